"""Calls over every interface, again and again, and the version that served each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any, NamedTuple

import aiohttp
import grpc.aio
import numpy as np

from tests.process import SECONDS
from tests.protocol_clients.channel import SERVICE as KSERVE
from tests.protocol_clients.grps import PREDICT_PATH, SERVICE
from tests.protocol_clients.tfserving import GET_MODEL_STATUS, PREDICT
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import management_pb2, predict_pb2, tensor_pb2

MODEL = "m"
PAUSE = 0.005
"""Seconds between two calls over an interface, which take about half of that."""
LOCAL = [("grpc.use_local_subchannel_pool", 1)]
STREAM = "kserve stream"

Answer = tuple[float, ...]
"""Elements of the model's output `y`: the version (the name of its folder), and the number in its file."""
Ask = Callable[[], Awaitable[Answer]]
Check = Callable[[], Awaitable[None]]


class Reply(NamedTuple):
    """A successful call. `content` is the number in the model's file; `sent` and `received` are instants of
    `time.monotonic`."""

    interface: str
    content: int
    sent: float
    received: float


def kserve_request() -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[np.zeros(1, "<f4").tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    return request


def kserve_answer(response: inference_pb2.ModelInferResponse) -> Answer:
    answer = tuple(np.frombuffer(response.raw_output_contents[0], "<f4").tolist())
    assert response.model_version == str(int(answer[0]))
    return answer


def kserve_grpc(channel: grpc.aio.Channel) -> Ask:
    call = channel.unary_unary(
        KSERVE + "ModelInfer", response_deserializer=inference_pb2.ModelInferResponse.FromString
    )
    request = kserve_request().SerializeToString()

    async def ask() -> Answer:
        return kserve_answer(await call(request, timeout=SECONDS))

    return ask


def kserve_stream(channel: grpc.aio.Channel) -> Ask:
    """Makes all calls on one stream, which outlives the versions that serve it."""
    call = channel.stream_stream(
        KSERVE + "ModelStreamInfer", response_deserializer=inference_pb2.ModelStreamInferResponse.FromString
    )()
    request = kserve_request().SerializeToString()

    async def ask() -> Answer:
        await call.write(request)
        async with asyncio.timeout(SECONDS):
            response = await call.read()
        assert not response.error_message, response.error_message
        return kserve_answer(response.infer_response)

    return ask


def tfserving_grpc(channel: grpc.aio.Channel) -> Ask:
    call = channel.unary_unary(PREDICT, response_deserializer=predict_pb2.PredictResponse.FromString)
    message = predict_pb2.PredictRequest(model_spec={"name": MODEL})
    message.inputs["x"].dtype = tensor_pb2.DT_FLOAT
    message.inputs["x"].tensor_shape.dim.add(size=1)
    message.inputs["x"].float_val.append(0)
    request = message.SerializeToString()

    async def ask() -> Answer:
        response = await call(request, timeout=SECONDS)
        answer = tuple(response.outputs["y"].float_val)
        assert response.model_spec.version.value == answer[0]
        return answer

    return ask


def grps_grpc(channel: grpc.aio.Channel) -> Ask:
    call = channel.unary_unary(SERVICE + "Predict", response_deserializer=GrpsMessage.FromString)
    message = GrpsMessage(model=MODEL)
    message.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=[1], flat_float32=[0])
    request = message.SerializeToString()

    async def ask() -> Answer:
        response = await call(request, timeout=SECONDS)
        assert response.status.code == 200, response
        return tuple(response.gtensors.tensors[0].flat_float32)

    return ask


def rest(session: aiohttp.ClientSession, url: str, body: object, answer: Callable[[Any], list[float]]) -> Ask:
    async def ask() -> Answer:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            return tuple(answer(await response.json()))

    return ask


def rest_asks(session: aiohttp.ClientSession, address: str) -> Mapping[str, Ask]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}
    gtensor = {"name": "x", "dtype": "DT_FLOAT32", "shape": [1], "flat_float32": [0]}
    return {
        "kserve REST": rest(
            session,
            f"http://{address}/v2/models/{MODEL}/infer",
            {"inputs": [tensor]},
            lambda body: body["outputs"][0]["data"],
        ),
        "tfserving REST": rest(
            session,
            f"http://{address}/v1/models/{MODEL}:predict",
            {"inputs": [0]},
            lambda body: body["outputs"],
        ),
        "grps HTTP": rest(
            session,
            f"http://{address}{PREDICT_PATH}",
            {"model": MODEL, "gtensors": {"tensors": [gtensor]}},
            lambda body: body["gtensors"]["tensors"][0]["flat_float32"],
        ),
    }


GRPC_ASKS: Mapping[str, Callable[[grpc.aio.Channel], Ask]] = {
    "kserve gRPC": kserve_grpc,
    STREAM: kserve_stream,
    "tfserving gRPC": tfserving_grpc,
    "grps gRPC": grps_grpc,
}


def readiness(session: aiohttp.ClientSession, address: str) -> Check:
    async def check() -> None:
        for path in ("/v2/health/ready", f"/v2/models/{MODEL}/ready"):
            async with session.get(f"http://{address}{path}") as response:
                assert response.status == 200, path

    return check


class Load:
    """Calls every interface, and runs the checks, again and again while the block of `going_on` runs."""

    def __init__(self, asks: Mapping[str, Ask], checks: Collection[Check]) -> None:
        self.replies: list[Reply] = []
        self._asks = asks
        self._checks = checks
        self._latest = dict.fromkeys(asks, 0)
        self._answered = asyncio.Condition()
        self._ends = False

    async def _ask(self, interface: str, ask: Ask) -> None:
        while not self._ends:
            sent = monotonic()
            content = int((await ask())[-1])
            self.replies.append(Reply(interface, content, sent, monotonic()))
            if content != self._latest[interface]:
                self._latest[interface] = content
                async with self._answered:
                    self._answered.notify_all()
            await asyncio.sleep(PAUSE)

    async def _check(self, check: Check) -> None:
        while not self._ends:
            await check()
            await asyncio.sleep(PAUSE)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Run the load during the block, and until the last calls end. Raise errors of calls and checks."""
        async with asyncio.TaskGroup() as tasks:
            for interface, ask in self._asks.items():
                tasks.create_task(self._ask(interface, ask), name=interface)
            for check in self._checks:
                tasks.create_task(self._check(check))
            yield
            self._ends = True

    async def first_answer(self, content: int) -> None:
        """Wait until a response of any interface has this content."""
        await self._until(lambda: content in self._latest.values())

    async def all_answer(self, content: int) -> None:
        """Wait until the latest response of every interface has this content."""
        await self._until(lambda: set(self._latest.values()) == {content})

    async def _until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS), self._answered:
            await self._answered.wait_for(true)


@asynccontextmanager
async def load_of(grpc_address: str, rest_address: str) -> AsyncIterator[Load]:
    """Yield the load for a server; its channels, stream and session stay open until the block ends."""
    async with AsyncExitStack() as stack:
        asks: dict[str, Ask] = {}
        for name, make in GRPC_ASKS.items():
            asks[name] = make(await stack.enter_async_context(grpc.aio.insecure_channel(grpc_address, LOCAL)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        asks |= rest_asks(session, rest_address)
        yield Load(asks, [readiness(session, rest_address)])


async def statuses(channel: grpc.aio.Channel) -> dict[int, str]:
    """Call GetModelStatus; returns the state of each version."""
    call = channel.unary_unary(
        GET_MODEL_STATUS, response_deserializer=management_pb2.GetModelStatusResponse.FromString
    )
    request = management_pb2.GetModelStatusRequest(model_spec={"name": MODEL})
    response = await call(request.SerializeToString(), timeout=SECONDS)
    name = management_pb2.ModelVersionStatus.State.Name
    return {status.version: name(status.state) for status in response.model_version_status}
