"""Each call is counted once, as what it was, however it ends; over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

import triglot
from tests.process import SECONDS
from tests.transports.live import Live, live, request
from tests.waiting import until
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import inference_pb2, predict_pb2
from triglot.telemetry.calls import CallStats
from triglot.testing import GatedModel

pytestmark = pytest.mark.both_transports

FLOAT = b"\0\0\x80\x3f"
GRPS = "/grps.protos.v1.GrpsService/"
PREDICTION = "/tensorflow.serving.PredictionService/"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
Key = tuple[str, str, str, str, int, str]


class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Mapping[str, Array]) -> Any:
        if inputs["x"].size > 2:
            raise RuntimeError("too many")
        return {"y": inputs["x"]}


class Counts(Echo):
    """A stream of as many answers as the first element says; the test lets each but the first one go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def infer(self, inputs: Mapping[str, Array]) -> Any:
        for number in range(int(inputs["x"][0])):
            yield {"y": inputs["x"] + number}
            assert self.go_on.wait(SECONDS)


class HalfPlusTwo(triglot.Model):
    """Classifies and regresses TensorFlow's examples."""

    signatures = {
        name: triglot.Signature(
            inputs=[triglot.TensorSpec("inputs", "BYTES", [-1])],
            outputs=[triglot.TensorSpec(output, "FP32", [-1, 1])],
            method=method,
        )
        for name, method, output in (
            ("serving_default", "predict", "outputs"),
            ("classify_x_to_y", "classify", "scores"),
            ("regress_x_to_y", "regress", "outputs"),
        )
    }

    def infer(self, inputs: Mapping[str, Array], call: triglot.Call) -> Any:
        output = "scores" if call.signature_name.startswith("classify") else "outputs"
        return {output: np.zeros((inputs["inputs"].size, 1), "f4")}


class Server:
    """The server, its models, and what it counted."""

    def __init__(self, running: Live, waits: GatedModel, counts: Counts) -> None:
        self.live = running
        self.waits = waits
        self.counts = counts
        self.telemetry = running.server.telemetry
        self.url = running.url.removesuffix("/v2")
        self.session = running.session

    async def settled(self) -> dict[Key, CallStats]:
        """What was counted of inference calls, once none is in flight; the model may still be at work."""
        await until(lambda: not self.telemetry.in_flight)
        return {
            (
                endpoint.protocol,
                endpoint.entrypoint,
                endpoint.method,
                kind.model,
                kind.version,
                kind.code.name,
            ): stats
            for endpoint, kind, stats in self.telemetry.calls()
            if endpoint.inference
        }

    async def call_counts(self) -> Counter[Key]:
        """How many calls of each kind."""
        return Counter({key: stats.latency.count for key, stats in (await self.settled()).items()})

    async def post(self, path: str, json: Any = None, **options: Any) -> tuple[int, bytes]:
        """Status and body of the answer."""
        async with self.session.post(self.url + path, json=json, **options) as response:
            return response.status, await response.read()

    async def until_started(self) -> None:
        """Until the model `waits` is at work."""
        await self.waits.until_at("infer")

    async def until_two(self) -> None:
        """Until two calls hold a model."""
        await until(lambda: self.live.leases() >= 2)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Server]:
    waits, counts = GatedModel("infer", inputs=Echo.inputs, outputs=Echo.outputs, max_queue_size=1), Counts()
    models = {"echo": Echo(), "waits": waits, "counts": counts, "half": HalfPlusTwo()}
    async with live(models, protocols="kserve,tfserving,grps", grace=0, **options) as running:
        try:
            yield Server(running, waits, counts)
        finally:
            waits.open_point("infer")
            counts.go_on.set()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as served:
        yield served


def kserve(model: str, version: int, code: str) -> Key:
    return ("kserve", "GRPC", "ModelInfer", model, version, code)


def kserve_rest(model: str, version: int, code: str) -> Key:
    return ("kserve", "REST", "infer", model, version, code)


async def test_kserve_grpc(server: Server) -> None:
    bad = request("echo", FLOAT, datatype="INT32")
    for data in (request("echo", FLOAT), request("nobody", FLOAT), request("echo", FLOAT * 3), bad, b"\xff"):
        try:
            await server.live.infer(data)
        except grpc.aio.AioRpcError:
            pass
    odd = pb.ModelInferRequest.FromString(request("echo", FLOAT))
    odd.outputs.add(name="nothing")
    with pytest.raises(grpc.aio.AioRpcError):
        await server.live.infer(odd.SerializeToString())
    assert await server.call_counts() == {
        kserve("echo", 1, "OK"): 1,
        kserve("nobody", 0, "NOT_FOUND"): 1,
        kserve("echo", 1, "INTERNAL"): 1,
        kserve("echo", 1, "INVALID_ARGUMENT"): 2,
        kserve("", 0, "INVALID_ARGUMENT"): 1,
    }


async def test_kserve_rest(server: Server) -> None:
    await server.post("/v2/models/echo/infer", BODY)
    await server.post("/v2/models/nobody/infer", BODY)
    await server.post("/v2/models/echo/infer", data=b"{")
    await server.post(
        "/v2/models/echo/infer", data=gzip.compress(b"{}")[:-9], headers={"Content-Encoding": "gzip"}
    )
    await server.post("/v2/models/echo/infer", data=b"{}", headers={"Content-Encoding": "br"})
    assert await server.call_counts() == {
        kserve_rest("echo", 1, "OK"): 1,
        kserve_rest("nobody", 0, "NOT_FOUND"): 1,
        kserve_rest("echo", 0, "INVALID_ARGUMENT"): 2,
        kserve_rest("echo", 0, "UNIMPLEMENTED"): 1,
    }


async def test_bytes_of_a_rest_call(server: Server) -> None:
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'

    async def chunks() -> AsyncIterator[bytes]:
        yield body[:10]
        yield body[10:]

    _, answer = await server.post("/v2/models/echo/infer", data=body)
    _, answer = await server.post("/v2/models/echo/infer", data=chunks())
    zipped = gzip.compress(body)
    _, answer = await server.post("/v2/models/echo/infer", data=zipped, headers={"Content-Encoding": "gzip"})
    _, error = await server.post("/v2/models/echo/infer", data=b"{")
    stats = await server.settled()
    done = stats[kserve_rest("echo", 1, "OK")]
    assert (done.bytes_in, done.bytes_out) == (2 * len(body) + len(zipped), 3 * len(answer))
    failed = stats[kserve_rest("echo", 0, "INVALID_ARGUMENT")]
    assert (failed.bytes_in, failed.bytes_out) == (1, len(error))


async def test_a_body_that_is_too_large() -> None:
    async with serving(max_message_size=10_000) as server:
        status, _ = await server.post("/v2/models/echo/infer", data=bytes(20_000))
        assert status == 413
        stats = await server.settled()
        assert stats[kserve_rest("echo", 0, "RESOURCE_EXHAUSTED")].latency.count == 1
        assert stats[kserve_rest("echo", 0, "RESOURCE_EXHAUSTED")].bytes_in <= 10_000


async def test_callers_who_leave(server: Server) -> None:
    call = server.live.infer(request("waits", FLOAT))
    await server.until_started()
    posted = asyncio.create_task(server.post("/v2/models/waits/infer", BODY))
    await server.until_two()
    call.cancel()
    posted.cancel()
    await asyncio.gather(posted, return_exceptions=True)
    stats = await server.settled()
    assert {key: stats.latency.count for key, stats in stats.items()} == {
        kserve("waits", 1, "CANCELLED"): 1,
        kserve_rest("waits", 1, "CANCELLED"): 1,
    }
    # One was at work, the other waited: which one, the transports decide.
    executed = [stats for stats in stats.values() if stats.compute is not None]
    assert len(executed) == 1
    assert executed[0].compute is not None
    assert 0 < executed[0].compute.sum <= executed[0].latency.sum


async def test_deadlines_and_full_queues(server: Server) -> None:
    first = server.live.infer(request("waits", FLOAT))
    await server.until_started()
    late = server.live.infer(request("waits", FLOAT), timeout=3)
    await server.until_two()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await server.live.infer(request("waits", FLOAT), timeout=SECONDS)
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        await late
    await until(lambda: server.live.leases() == 1)  # The client's clock may be ahead of the server's.
    server.waits.open_point("infer")
    await first
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    codes = ["OK", refused.value.code().name]
    # A call that was read late is left, by its client's clock, before the server's says so.
    late_codes = [[*codes, code] for code in ("DEADLINE_EXCEEDED", "CANCELLED")]
    assert await server.call_counts() in [{kserve("waits", 1, code): 1 for code in codes} for codes in late_codes]


async def test_a_rest_call_that_takes_too_long() -> None:
    async with serving(rest_timeout=2) as server:
        status, _ = await server.post("/v2/models/waits/infer", BODY)
        assert status == 504
        assert await server.call_counts() == {kserve_rest("waits", 1, "DEADLINE_EXCEEDED"): 1}


async def test_refused_calls_are_counted_with_their_method() -> None:
    async with serving(max_connections=1) as server:
        first = asyncio.create_task(server.post("/v2/models/waits/infer", BODY))
        await server.until_started()
        status, answer = await server.post("/v2/models/echo/infer", BODY)
        assert status == 503
        server.waits.open_point("infer")
        await first
        stats = await server.settled()
        assert {key: stats.latency.count for key, stats in stats.items()} == {
            kserve_rest("waits", 1, "OK"): 1,
            kserve_rest("echo", 0, "UNAVAILABLE"): 1,
        }
        assert stats[kserve_rest("echo", 0, "UNAVAILABLE")].bytes_out == len(answer)


async def test_calls_that_the_servers_end_cuts_short(server: Server) -> None:
    posted = asyncio.create_task(server.post("/v2/models/waits/infer", BODY))
    await server.until_started()
    await server.live.server.stop()
    assert (await posted)[0] == 503
    assert await server.call_counts() == {kserve_rest("waits", 1, "UNAVAILABLE"): 1}


async def test_a_stream_of_requests(server: Server) -> None:
    server.counts.go_on.set()
    requests = [request("echo", FLOAT), request("nobody", FLOAT), request("counts", b"\0\0\x40\x40"), b"\xff"]
    call = server.live.stream_infer(iter(requests))
    answers = [answer async for answer in call]
    assert len(answers) == 6
    stats = await server.settled()
    stream = "kserve", "GRPC", "ModelStreamInfer"
    assert {key: stats.latency.count for key, stats in stats.items()} == {
        (*stream, "echo", 1, "OK"): 1,
        (*stream, "nobody", 0, "NOT_FOUND"): 1,
        (*stream, "counts", 1, "OK"): 1,
        (*stream, "", 0, "INVALID_ARGUMENT"): 1,
    }
    assert sum(stats.bytes_in for stats in stats.values()) == sum(map(len, requests))
    assert sum(stats.bytes_out for stats in stats.values()) == sum(answer.ByteSize() for answer in answers)


async def test_a_stream_that_the_client_leaves(server: Server) -> None:
    call = server.live.stream_infer(iter([request("counts", b"\0\0\x40\x40")]))
    await call.read()
    call.cancel()
    stats = await server.settled()
    (key, counts), *more = stats.items()
    assert key == ("kserve", "GRPC", "ModelStreamInfer", "counts", 1, "CANCELLED")
    assert not more
    assert counts.compute is not None
    assert counts.compute.sum > 0


async def test_a_grps_stream_that_the_client_leaves(server: Server) -> None:
    server.counts.go_on.set()
    predict = server.live.channel.unary_stream(GRPS + "PredictStreaming")
    message = grps_pb2.GrpsMessage(model="counts-1")
    message.gtensors.tensors.add(dtype=grps_pb2.DT_FLOAT32, shape=[1], flat_float32=[1e9])
    for _ in range(5):
        call = predict(message.SerializeToString())
        await call.read()
        call.cancel()
    key = ("grps", "GRPC", "PredictStreaming", "counts", 1, "CANCELLED")
    assert await server.call_counts() == {key: 5}


async def test_tensorflow_serving(server: Server) -> None:
    await server.post("/v1/models/echo:predict", {"instances": [1.0]})
    await server.post("/v1/models/echo:predict", {"instances": ["a"]})
    await server.post("/v1/models/echo:predict", {"signature_name": "no", "instances": [1]})
    await server.post("/v1/models/nobody:predict", {"instances": [1.0]})
    await server.post("/v1/models/echo:predict", data=b"{")
    await server.post("/v1/projects/p/models/echo:predict", {"instances": [1.0]})
    await server.post("/v1/projects/p/models/nobody:predict", {"instances": [1.0]})
    await server.post("/v1/projects/p/models/echo:predict", data=b"{")
    counts = await server.call_counts()
    platform = "projects.predict"
    assert counts == {
        ("tfserving", "REST", "predict", "echo", 1, "OK"): 1,
        # The signature says how JSON is to be read, so these found no version.
        ("tfserving", "REST", "predict", "echo", 0, "INVALID_ARGUMENT"): 3,
        ("tfserving", "REST", "predict", "nobody", 0, "NOT_FOUND"): 1,
        ("tfserving", "REST", platform, "echo", 1, "OK"): 1,
        ("tfserving", "REST", platform, "nobody", 0, "NOT_FOUND"): 1,
        ("tfserving", "REST", platform, "echo", 0, "INVALID_ARGUMENT"): 1,
    }


async def test_tensorflow_serving_grpc(server: Server) -> None:
    async def ask(method: str, message: Any) -> None:
        with suppress(grpc.aio.AioRpcError):
            await server.live.channel.unary_unary(PREDICTION + method)(message.SerializeToString())

    several = inference_pb2.MultiInferenceRequest()
    for method in ("classify", "regress"):
        task = several.tasks.add(method_name=f"tensorflow/serving/{method}")
        task.model_spec.name, task.model_spec.signature_name = "half", f"{method}_x_to_y"
    several.input.example_list.examples.add()
    await ask("MultiInference", several)
    classify = inference_pb2.ClassificationRequest(input=several.input)
    classify.model_spec.name, classify.model_spec.signature_name = "half", "classify_x_to_y"
    await ask("Classify", classify)
    classify.model_spec.signature_name = "no"
    await ask("Classify", classify)
    predict = predict_pb2.PredictRequest()
    predict.model_spec.name = "half"
    await ask("Predict", predict)
    predict.model_spec.version.value = 7
    await ask("Predict", predict)
    stats = await server.settled()
    protocol = "tfserving", "GRPC"
    assert {key: stats.latency.count for key, stats in stats.items()} == {
        (*protocol, "MultiInference", "half", 1, "OK"): 1,
        (*protocol, "Classify", "half", 1, "OK"): 1,
        (*protocol, "Classify", "half", 1, "INVALID_ARGUMENT"): 1,
        (*protocol, "Predict", "half", 1, "INVALID_ARGUMENT"): 1,
        (*protocol, "Predict", "half", 0, "NOT_FOUND"): 1,
    }
    both = stats[*protocol, "MultiInference", "half", 1, "OK"]
    assert both.batches == {1: 1}
    assert both.compute is not None
    assert 0 < both.compute.sum < both.latency.sum
