"""Models, clients and sequences of calls whose requests have layouts that are known, or not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import grpc.aio
import numpy as np

import triglot
from tests.served_models import SECONDS, Served, serving
from tests.transports.call_ends import Seen, seen
from triglot.config.options import GRPC_TRANSPORTS
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument
from triglot.core.operation import EVERYTHING
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2, tensor_pb2
from triglot.testing import GatedModel

COLUMNS = 4
Arrays = Mapping[str, Any]


def raising(error: type[BaseException], *arguments: str) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        raise error(*arguments)

    return fails


def plain(_: Any, y: Any, z: Any) -> dict[str, Any]:
    return {"y": y, "z": z}


ANSWERS: list[Callable[[Any, Any, Any], Any]] = [
    plain,
    raising(ValueError, "what the client is not to see"),
    raising(InvalidArgument, "the model wants more"),
    raising(SystemExit),
    raising(asyncio.CancelledError),
    lambda _, y, z: {"y": y.astype(np.float64), "z": z},
    lambda _, y, z: {"y": y[:, :2], "z": z},
    lambda _, y, z: triglot.Answer({"y": y, "z": z}, {"note": "seen"}),
    lambda _, y, __: {"y": y},
    lambda _, y, z: {"y": np.repeat(y, 2, 0)[::2], "z": z},
    lambda _, y, z: {"y": np.asfortranarray(np.vstack([y, y])), "z": z},
    lambda _, y, z: MappingProxyType({"y": y, "z": z}),
    lambda _, y, z: {"y": y.tolist(), "z": z.tolist(), "more": 1},
    lambda _, y, z: {"y": y[0], "z": z},
    lambda _, y, z: {"y": y.astype(">f4"), "z": z},
    lambda *_: None,
    lambda *_: [],
    lambda _, __, z: {"y": np.zeros((1, 5000), np.float32), "z": z},
    lambda _, __, z: {"y": np.zeros((0, 3), np.float32), "z": z[:0]},
    lambda x, _, z: {"y": x, "z": z},
]


class Mixed(triglot.Model):
    """What becomes of a call depends on its first element."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, COLUMNS]),)
    outputs: Sequence[triglot.TensorSpec] = (
        triglot.TensorSpec("y", "FP32", [-1, -1]),
        triglot.TensorSpec("z", "FP32", [-1]),
    )

    def infer(self, inputs: Arrays) -> Any:
        x = inputs["x"]
        return ANSWERS[int(x[0, 0])](x, x * 2, x[:, 0])


class Unary(Mixed):
    """The same with a single output, which is all that grps joins by itself."""

    outputs = Mixed.outputs[:1]


class Batched(Mixed):
    max_batch_size = 4
    dynamic_batching = triglot.DynamicBatching()


MODELS: dict[str, type[triglot.Model]] = {"mixed": Mixed, "one": Unary, "batched": Batched}
WRONG = 5
KINDS = [0, 0, 0, *range(len(ANSWERS)), 0, WRONG, WRONG, 0, 1, 0]


def array(value: float, rows: int = 1) -> Any:
    x = np.arange(rows * COLUMNS, dtype=np.float32).reshape(rows, COLUMNS)
    x[0, 0] = value
    return x


def kserve(model: str, x: Any, *outputs: str, name: str = "x") -> bytes:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
    message.inputs.add(name=name, datatype="FP32", shape=x.shape)
    for output in outputs:
        message.outputs.add(name=output)
    return message.SerializeToString()


def tfserving(model: str, x: Any, *outputs: str, name: str = "x") -> bytes:
    message = predict_pb2.PredictRequest(output_filter=outputs)
    message.model_spec.name = model
    tensor = message.inputs[name]
    tensor.dtype, tensor.tensor_content = tensor_pb2.DT_FLOAT, x.tobytes()
    for dim in x.shape:
        tensor.tensor_shape.dim.add(size=dim)
    return message.SerializeToString()


def grps(model: str, x: Any, *, name: str = "x") -> bytes:
    message = grps_pb2.GrpsMessage(model=f"{model}-1")
    message.gtensors.tensors.add(
        name=name, dtype=grps_pb2.DT_FLOAT32, shape=x.shape, flat_float32=x.ravel().tolist()
    )
    return message.SerializeToString()


PROTOCOLS: dict[str, tuple[str, Callable[..., bytes]]] = {
    "kserve": ("/inference.GRPCInferenceService/ModelInfer", kserve),
    "tfserving": ("/tensorflow.serving.PredictionService/Predict", tfserving),
    "grps": ("/grps.protos.v1.GrpsService/Predict", grps),
}
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def nameless(end: Seen) -> Seen:
    """Without the number by which the log knows an error."""
    number = rb"error [0-9a-f]{12}"
    answers = tuple(re.sub(number, b"error", answer) for answer in end.answers)
    return replace(end, details=re.sub(number.decode(), "error", end.details or ""), answers=answers)


UNKNOWN = b"\x9d\x06\0\0\0\0"
"""A field of a kind that no request has: a message with it is parsed as a whole, each time."""


class Client:
    """`suffix` stands behind each request."""

    def __init__(self, served: Served, channel: grpc.aio.Channel, suffix: bytes = b"") -> None:
        self.served = served
        self.channel = channel
        self.suffix = suffix

    def call(self, protocol: str, model: str, x: Any, *outputs: str, timeout: float | None = SECONDS) -> Any:
        path, encode = PROTOCOLS[protocol]
        return self.channel.unary_unary(path)(encode(model, x, *outputs) + self.suffix, timeout=timeout)

    async def ask(self, protocol: str, model: str, x: Any, *outputs: str) -> Any:
        """How the call ends."""
        return nameless(await seen(self.call(protocol, model, x, *outputs)))

    def call_counts(self) -> dict[Any, Any]:
        """All that is counted, but for times and what the requests take."""
        calls = {
            (endpoint.protocol, endpoint.method, kind): (
                stats.latency.count,
                stats.codec and stats.codec.count,
                stats.compute and stats.compute.count,
                stats.batches,
                stats.bytes_out,
                endpoint.in_flight,
            )
            for endpoint, kind, stats in self.served.server.telemetry.calls()
        }
        models = {
            version.files.name: (
                version.servable.statistics.success.count,
                version.servable.statistics.fail.count,
                version.servable.statistics.inference_count,
                version.servable.statistics.execution_count,
                version.servable.statistics.failures,
                {rows: done.count for rows, done in version.servable.statistics.batches.items()},
                {
                    (read.name, *read.labels.items()): read.value
                    for read in version.servable.readings()
                    if read.counter
                },
                version.servable.leases,
            )
            for version in self.served.server.dataplane.versions(EVERYTHING)
            if version.servable is not None
        }
        return {"calls": calls, "models": models}


@asynccontextmanager
async def served(transport: str, models: Mapping[str, triglot.Model], **options: Any) -> AsyncIterator[Client]:
    async with serving(models, grpc_transport=transport, **options) as here:
        address = f"127.0.0.1:{here.server.grpc_port}"
        async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield Client(here, channel)


async def alike(
    models: Callable[[], Mapping[str, triglot.Model]],
    calls: Callable[[Client], Awaitable[Any]],
    **options: Any,
) -> None:
    """The calls are the same over each transport, and where each request is parsed as a whole."""
    results = []
    for transport, suffix in (("h2", UNKNOWN), *((transport, b"") for transport in GRPC_TRANSPORTS)):
        # What a busy machine counts is not what the calls do.
        async with served(transport, models(), loop_lag_warning=SECONDS, **options) as client:
            client.suffix = suffix
            result = await calls(client)
            await client.served.is_idle()
            results.append((result, client.call_counts()))
    expected, *others = results
    for found in others:
        assert found == expected


class Held(GatedModel):
    """Keeps its calls."""

    inputs, outputs = Mixed.inputs, Mixed.outputs

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def infer(self, inputs: Arrays, call: Call) -> Any:
        self.calls.append(call)
        self.wait_at("infer")
        return plain(None, inputs["x"], inputs["x"][:, 0])


@asynccontextmanager
async def holding(transport: str, protocol: str, **options: Any) -> AsyncIterator[tuple[Client, Held, Any]]:
    """A call of a known layout, while its model runs."""
    model = Held()
    async with served(transport, {"held": model}, **options) as client:
        try:
            for _ in range(3):
                assert (await client.ask(protocol, "held", array(0))).code == "OK"
            model.forget_arrivals("infer")
            model.close_point("infer")
            call = client.call(protocol, "held", array(0))
            await model.until_at("infer")
            yield client, model, call
        finally:
            model.open_point("infer")
