"""What a call takes, and leaves behind, however it ends: nothing that Python knows of."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import struct
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

import triglot
from tests.served_models import serving
from tests.transports.live import Live, live, request
from tests.waiting import until
from triglot.config.options import GRPC_TRANSPORTS
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import GatedModel

CALLS, ROUNDS = 60, 3
AT_ONCE = 10
LIMIT = 1024.0
"""Bytes per call."""
RAW = bytes(64)


class Answers(triglot.Model):
    """Keeps something of each call, if it is to."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    keeps = False

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def infer(self, inputs: Any) -> Any:
        if self.keeps:
            self.kept.append(bytearray(4 * int(LIMIT)))
        return {"y": inputs["x"]}


class Circles(triglot.Model):
    inputs, outputs = Answers.inputs, Answers.outputs

    def infer(self, inputs: Any, call: triglot.Call) -> Any:
        call.trace = call
        return {"y": inputs["x"]}


class Refuses(Answers):
    def infer(self, inputs: Any) -> Any:
        raise triglot.InvalidArgument("never")


class Waits(Answers):
    """Knows its calls by their value."""

    def __init__(self) -> None:
        super().__init__()
        self.values = itertools.count(1)
        self.running: set[float] = set()

    async def infer(self, inputs: Any) -> Any:
        value = float(inputs["x"][0])
        self.running.add(value)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.discard(value)


class Endless(Answers):
    def infer(self, inputs: Any) -> Iterator[Any]:
        while True:
            yield {"y": inputs["x"]}


async def ok(here: Live) -> None:
    await here.infer(request("answers", RAW))


async def large(here: Live) -> None:
    await here.infer(request("answers", bytes(200_000)))


async def unknown_method(here: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await here.channel.unary_stream("/grpc.health.v1.Health/ConnectionTimers")(b"\xff").read()


async def failed_stream(here: Live) -> None:
    """Ends with a status, as its client asks for."""
    call = here.stream_infer(iter([request("refuses", RAW)]), metadata=(("triton_grpc_error", "true"),))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()


async def circle(here: Live) -> None:
    await here.infer(request("circles", RAW))


async def stream(here: Live) -> None:
    call = here.stream_infer(iter([request("answers", RAW)] * 3))
    assert [answer.error_message async for answer in call] == [""] * 3


async def error(here: Live) -> None:
    for model in ("refuses", "none"):
        with pytest.raises(grpc.aio.AioRpcError):
            await here.infer(request(model, RAW))


async def cancel(here: Live) -> None:
    model = here.models["waits"]
    assert isinstance(model, Waits)
    value = next(model.values)
    call = here.infer(request("waits", struct.pack("<f", value)))
    await until(lambda: value in model.running or call.done())
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def deadline(here: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await here.infer(request("waits", RAW), timeout=0.01)


async def cut(here: Live) -> None:
    call = here.stream_infer(iter([request("endless", RAW)]))
    await call.read()
    call.cancel()


Shape = Callable[[Live], Awaitable[None]]


def made() -> dict[str, Any]:
    """The models by name."""
    return {kind.__name__.lower(): kind() for kind in (Answers, Circles, Refuses, Waits, Endless)}


async def growth(shape: Shape, transport: str, *, keeps: bool = False) -> list[float]:
    """Bytes per call that are left of those of each round."""
    models = made()
    async with live(models, grpc_transport=transport) as here:
        await ask(shape, here)  # What is made once is there now.
        models["answers"].keeps = keeps
        sizes = [await size(here)]
        for _ in range(ROUNDS):
            await ask(shape, here)
            sizes.append(await size(here))
        return [(after - before) / CALLS for before, after in itertools.pairwise(sizes)]


async def ask(shape: Shape, here: Live) -> None:
    for _ in range(CALLS // AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(_call_of(shape, here))


async def _call_of(shape: Shape, here: Live) -> None:
    await shape(here)


async def size(here: Live) -> int:
    """What Python has allocated, once nothing runs."""
    await until(lambda: not here.leases())
    sizes: list[int] = []
    # gRPC's client and the model's threads let go of a call a moment after it.
    while len(sizes) < 4 or min(sizes[-3:]) < sizes[-4] - LIMIT:
        await asyncio.sleep(0.01)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    return sizes[-1]


@pytest.fixture
def _traced() -> Iterator[None]:
    logging.disable()  # pytest keeps what is logged.
    tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("shape", [ok, error, cancel, deadline, cut])
async def test_nothing_is_left(shape: Shape, transport: str) -> None:
    # A buffer grows once; what leaks does so each time.
    assert min(await growth(shape, transport)) < LIMIT


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_what_is_left_is_seen(transport: str) -> None:
    # Of all rounds: where one began with something of the calls before, the next one did not.
    assert sum(await growth(ok, transport, keeps=True)) / ROUNDS > 3 * LIMIT


# --- nor for the garbage collector ---


async def garbage(shape: Shape, transport: str) -> list[object]:
    """Our own objects that only the garbage collector gets rid of."""
    async with live(made(), grpc_transport=transport) as here:
        await ask(shape, here)
        await size(here)
        gc.disable()
        try:
            await ask(shape, here)
            await until(lambda: not here.leases())
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return [leaked for leaked in gc.garbage if type(leaked).__module__.startswith("triglot.")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("shape", [ok, large, stream, error, unknown_method, failed_stream, cancel, deadline, cut])
async def test_a_call_is_no_circle(shape: Shape, transport: str) -> None:
    # What is made once, or of a call that has not quite ended, is not of each call.
    assert len(await garbage(shape, transport)) < CALLS // 2


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_circles_are_seen(transport: str) -> None:
    assert len(await garbage(circle, transport)) >= CALLS


MANY_CALLS = 40
REQUEST = {"InferenceRequest", "InputTensor"}
"""The request and its tensors."""
WIRE = {"RpcHead", "Stream", "_Outgoing"}
"""The request's headers, and the state of its HTTP/2 stream, in and out."""


def living() -> Counter[str]:
    """Our own objects, by type."""
    return Counter(
        type(tracked).__name__
        for tracked in gc.get_objects()
        if str(type(tracked).__module__).startswith("triglot.")
    )


@pytest.mark.parametrize(("transport", "call"), [("h2", "Rpc"), ("aio", "AioCall")])
async def test_a_unary_call_is_three_objects(transport: str, call: str) -> None:
    model = GatedModel("infer")
    async with (
        serving({"m": model}, grpc_transport=transport) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.server.grpc_port}") as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        data = request.SerializeToString()
        gc.collect()
        before = living()
        answers = [asyncio.ensure_future(infer(data, timeout=60)) for _ in range(MANY_CALLS)]
        await until(lambda: here.server.dataplane.queue_depth() == MANY_CALLS - 1)
        gc.collect()
        of_a_call = {name for name, count in (living() - before).items() if count >= MANY_CALLS}
        model.open_point("infer")
        await asyncio.gather(*answers)
    assert of_a_call - REQUEST - WIRE == {call, "Call", "Work"}
