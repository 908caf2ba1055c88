"""Calls that fail, by every method and route that runs models, with bodies large enough to be found again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

import triglot
from tests.transports.h2_peers import SECONDS, data
from tests.transports.layout_calls import PROTOCOLS, STREAM
from tests.transports.live import Live
from tests.transports.test_h2_rest import client_of, fields
from tests.waiting import until
from triglot.core.fast_json import dumps
from triglot.transports.http2.core import frames

X = [triglot.TensorSpec("x", "FP32", [-1])]
Y = [triglot.TensorSpec("y", "FP32", [-1])]


class Refuses(triglot.Model):
    inputs, outputs = X, Y

    def infer(self, inputs: Any) -> Any:
        raise triglot.InvalidArgument("never")


class Batched(Refuses):
    max_batch_size = 8


class Cached(Refuses):
    response_cache = True


class Fails(triglot.Model):
    inputs, outputs = X, Y

    def infer(self, inputs: Any) -> Any:
        raise ValueError("of its own")


class FailsOnLoop(triglot.Model):
    inputs, outputs = X, Y

    async def infer(self, inputs: Any) -> Any:
        await asyncio.sleep(0)
        raise triglot.FailedPrecondition("not now")


class FailsLate(triglot.Model):
    inputs, outputs = X, Y

    def infer(self, inputs: Any) -> Iterator[Any]:
        yield {"y": np.zeros(1, np.float32)}
        raise triglot.FailedPrecondition("no more")


class WrongAnswer(triglot.Model):
    inputs, outputs = X, Y

    def infer(self, inputs: Any) -> Any:
        return {"z": inputs["x"]}


class Waits(triglot.Model):
    inputs, outputs = X, Y

    def __init__(self) -> None:
        self.running = 0

    async def infer(self, inputs: Any) -> Any:
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1


class Keeps(triglot.Model):
    """Leaves a circle with what it was given."""

    inputs, outputs = X, Y

    def infer(self, inputs: Any, call: triglot.Call) -> Any:
        call.trace = (call, inputs["x"])
        raise triglot.InvalidArgument("never")


class Full(triglot.Model):
    """Has one instance, which waits for the test."""

    inputs, outputs = X, Y

    def __init__(self) -> None:
        self.gate = threading.Event()

    def infer(self, inputs: Any) -> Any:
        assert self.gate.wait(SECONDS * 10)
        return {"y": inputs["x"]}


class Chain(triglot.Ensemble):
    inputs, outputs = X, Y
    steps = (triglot.Step("refuses", {"x": "x"}, {"y": "y"}),)


def models() -> dict[str, triglot.Model]:
    """By name; `full` is one whose queue the test fills."""
    made: dict[str, triglot.Model] = {
        "refuses": Refuses(),
        "batched": Batched(),
        "cached": Cached(),
        "fails": Fails(),
        "fails_on_loop": FailsOnLoop(),
        "fails_late": FailsLate(),
        "wrong_answer": WrongAnswer(),
        "chain": Chain(),
        "waits": Waits(),
        "full": Full(),
    }
    return made


@dataclass(frozen=True)
class Request:
    """A request as it is sent; `path` is a method's or a route's."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Build = Callable[[str, int, str], Request]
"""Of a model's name, a count of numbers and the input's name."""


def over(protocol: str, path: str = "") -> Build:
    """Requests of a protocol's unary method, or of another one with the same messages."""
    unary, encode = PROTOCOLS[protocol]
    return lambda model, count, name: Request(path or unary, encode(model, np.zeros(count, np.float32), name=name))


kserve_grpc = over("kserve")
GRPC = {
    "kserve": kserve_grpc,
    "kserve stream": over("kserve", STREAM),
    "tensorflow": over("tfserving"),
    "grps": over("grps"),
    "grps stream": over("grps", "/grps.protos.v1.GrpsService/PredictStreaming"),
}


def _json(path: str, value: Any) -> Request:
    return Request(path, dumps(value), {"content-type": "application/json"})


def _rows(count: int, name: str) -> list[dict[str, float]]:
    """As many as have about `count` numbers' bytes of text."""
    return [{name: 0.5}] * (count // 3)


def kserve_json(model: str, count: int, name: str) -> Request:
    tensor = {"name": name, "datatype": "FP32", "shape": [count], "data": [0.5] * count}
    return _json(f"/v2/models/{model}/infer", {"inputs": [tensor]})


def kserve_binary(model: str, count: int, name: str) -> Request:
    size = {"binary_data_size": 4 * count}
    tensor = {"name": name, "datatype": "FP32", "shape": [count], "parameters": size}
    head = dumps({"inputs": [tensor]})
    headers = {"inference-header-content-length": str(len(head))}
    return Request(f"/v2/models/{model}/infer", head + bytes(4 * count), headers)


def kserve_generate(model: str, count: int, name: str) -> Request:
    return _json(f"/v2/models/{model}/generate", {name: [0.5] * count})


def kserve_generate_stream(model: str, count: int, name: str) -> Request:
    return _json(f"/v2/models/{model}/generate_stream", {name: [0.5] * count})


def tf_rows(model: str, count: int, name: str) -> Request:
    return _json(f"/v1/models/{model}:predict", {"instances": _rows(count, name)})


def tf_columns(model: str, count: int, name: str) -> Request:
    return _json(f"/v1/models/{model}:predict", {"inputs": {name: [0.5] * count}})


def tf_classify(model: str, count: int, name: str) -> Request:
    return _json(f"/v1/models/{model}:classify", {"examples": [{name: [0.5] * count}]})


def ai_platform(model: str, count: int, name: str) -> Request:
    return _json(f"/v1/projects/p/models/{model}:predict", {"instances": _rows(count, name)})


def grps_json(model: str, count: int, name: str) -> Request:
    tensor = {"name": name, "dtype": "DT_FLOAT32", "shape": [count], "flat_float32": [0.5] * count}
    return _json("/grps/v1/infer/predict", {"model": f"{model}-1", "gtensors": {"tensors": [tensor]}})


def grps_bytes(model: str, count: int, name: str) -> Request:
    path = f"/grps/v1/infer/predict?model={model}-1"
    return Request(path, bytes(4 * count), {"content-type": "application/octet-stream"})


def grps_json_stream(model: str, count: int, name: str) -> Request:
    plain = grps_json(model, count, name)
    return Request(f"{plain.path}?streaming=true", plain.body, plain.headers)


REST = (
    kserve_json,
    kserve_binary,
    kserve_generate,
    kserve_generate_stream,
    tf_rows,
    tf_columns,
    tf_classify,
    ai_platform,
    grps_json,
    grps_bytes,
    grps_json_stream,
)
NOT_RUN = (tf_classify, grps_bytes, kserve_generate, kserve_generate_stream)
"""Requests that these models do not take."""
Left = Callable[[], bool]
"""Whether it is time for the client to leave."""


async def over_grpc(here: Live, request: Request, left: Left | None) -> None:
    """Until the call has ended."""
    call = here.channel.stream_stream(request.path)(iter([request.body]))
    if left is not None:
        await until(lambda: left() or call.done())
        call.cancel()
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass


async def over_http1(here: Live, request: Request, left: Left | None) -> None:
    """As above."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
    lines = [f"POST {request.path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"Content-Length: {len(request.body)}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    writer.write(request.body)
    answer = asyncio.create_task(reader.read())
    await until(lambda: answer.done() or (left is not None and left()))
    writer.close()
    if left is None:
        assert answer.result()
    answer.cancel()


async def over_http2(here: Live, request: Request, left: Left | None) -> None:
    """As above."""
    async with client_of(here.server.grpc_port) as client:
        headers = [*request.headers.items(), ("content-length", str(len(request.body)))]
        await client.send(client.raw_headers(1, fields("POST", request.path, *headers)))
        for at in range(0, len(request.body), 16_000):
            last = at + 16_000 >= len(request.body)
            await client.send(data(1, request.body[at : at + 16_000], end=last))

        async def read() -> None:
            while (
                not (await client.next(frames.HEADERS, frames.DATA, frames.RST_STREAM)).flags & frames.END_STREAM
            ):
                pass

        answer = asyncio.create_task(read())
        await until(lambda: answer.done() or (left is not None and left()))
        if not answer.done():
            answer.cancel()
            await asyncio.wait([answer])
            await client.send(frames.rst_stream(1, frames.ErrorCode.CANCEL))
            await client.wait_until_processed()
