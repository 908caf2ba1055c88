"""Whatever a model's own code raises: each call has its answer, and the server continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from live import Live, live, request

import triglot
from triglot import testing
from triglot.core.tensor import Array
from waiting import until

pytestmark = pytest.mark.both_transports

SECONDS = 20.0
FLOAT = b"\0\0\x80\x3f"


class Own(BaseException):
    """One that code of a user's may have."""


ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(3),
    "StopAsyncIteration": StopAsyncIteration,
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "BaseException": Own,
}


class Raises(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    max_batch_size = 8

    def __init__(self, batching: triglot.DynamicBatching | None = None) -> None:
        self.error: Callable[[], BaseException] | None = None
        self.dynamic_batching = batching

    def answer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self.error is not None:
            raise self.error()
        return {"y": inputs["x"]}


class Plain(Raises):
    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.answer(inputs)


class OnLoop(Raises):
    async def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.answer(inputs)


class LaterOnLoop(Raises):
    async def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        await asyncio.sleep(0)
        return self.answer(inputs)


class Streams(Raises):
    def infer(self, inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        yield self.answer(inputs)


class StreamsOnLoop(Raises):
    async def infer(self, inputs: Mapping[str, Array]) -> AsyncIterator[dict[str, Array]]:
        yield self.answer(inputs)


class Lists(Raises):
    """Takes the requests of a batch as a list."""

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.answer(inputs)

    def infer_batch(self, requests: list[Any], calls: list[Any]) -> list[dict[str, Array]]:
        return [self.answer(request) for request in requests]


class Sequences(OnLoop):
    sequence_batching = triglot.SequenceBatching()


class CallsAnother(triglot.Model):
    inputs = Raises.inputs
    outputs = Raises.outputs

    async def infer(self, inputs: Mapping[str, Array], call: triglot.Call) -> Any:
        return await call.infer("m", inputs)


class Ensemble(triglot.Ensemble):
    inputs = Raises.inputs
    outputs = Raises.outputs
    steps = [triglot.Step("m", inputs={"x": "x"}, outputs={"y": "y"})]


JOINS = triglot.DynamicBatching(preferred_sizes=[2], max_queue_delay=SECONDS)
KINDS: Mapping[str, Callable[[], Raises]] = {
    "a function": Plain,
    "a function in batches": lambda: Plain(JOINS),
    "a list of requests": lambda: Lists(JOINS),
    "async def": OnLoop,
    "async def that has waited": LaterOnLoop,
    "async def in batches": lambda: OnLoop(JOINS),
    "a generator": Streams,
    "an async generator": StreamsOnLoop,
}


async def codes(server: Live, model: str) -> list[grpc.StatusCode]:
    """Of two calls at the same time: with batching these two make a batch."""
    calls = [server.infer(request(model, FLOAT, shape=(1,)), timeout=SECONDS) for _ in range(2)]
    return [await call.code() for call in calls]


async def errors(server: Live, model: str) -> list[bool]:
    """Of a stream's answers to two requests, whether each is an error with an id."""
    stream = server.stream_infer(iter([request(model, FLOAT, shape=(1,))] * 2), timeout=SECONDS)
    return [" failed, error " in answer.error_message async for answer in stream]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("kind", KINDS)
async def test_its_calls_fail_and_the_next_are_answered(kind: str, name: str) -> None:
    model = KINDS[kind]()
    streams = isinstance(model, Streams | StreamsOnLoop)
    others = {} if streams else {"calls": CallsAnother(), "ensemble": Ensemble()}
    async with live({"m": model, **others}) as server:
        model.error = ERRORS[name]
        assert await errors(server, "m") == [True, True]
        for other in others:
            assert await codes(server, other) == [grpc.StatusCode.INTERNAL] * 2
        if not streams:
            assert await codes(server, "m") == [grpc.StatusCode.INTERNAL] * 2
            tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
            async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
                posted = [
                    group.create_task(status(server, "/models/m/infer", {"inputs": [tensor]})) for _ in range(2)
                ]
            assert [task.result() for task in posted] == [500, 500]
        assert server.leases() == 0
        model.error = None
        assert await errors(server, "m") == [False, False]
        for other in () if streams else ("m", *others):
            assert await codes(server, other) == [grpc.StatusCode.OK] * 2


async def status(server: Live, path: str, body: object) -> int:
    async with server.session.post(server.url + path, json=body) as response:
        return response.status


# --- before it serves, and after ---

HOOKED = """
import asyncio
import triglot

class Own(BaseException):
    pass

def fail(*_):
    raise {error}

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    {infer}
        return {{"y": inputs["x"]}}

    {hook}
"""
INFERS = ["def infer(self, inputs):", "async def infer(self, inputs):"]
HOOKS = {
    "__init__": "__init__ = fail",
    "load": "load = fail",
    "start_instance": "start_instance = fail",
    "what it declares": "instances = property(fail)",
    "what it declares of its queue": "max_queue_size = property(fail)",
}
WARM_UP = """
model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
"""
RAISED = {name: f"{name}(3)" for name in ERRORS} | {
    "BaseException": "Own(3)",
    "CancelledError": "asyncio.CancelledError(3)",
}


def write(folder: Path, text: str) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(WARM_UP)
    (folder / "1" / "model.py").write_text(text)


def hooked(infer: str, hook: str = "", error: str = "") -> str:
    return HOOKED.format(error=error or "ValueError", infer=infer, hook=hook)


@pytest.mark.both_transports(False)
@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("hook", [*HOOKS, "a warm-up"])
@pytest.mark.parametrize("infer", INFERS)
async def test_exception_of_a_load_is_reported_and_the_next_model_loads(
    tmp_path: Path, infer: str, hook: str, name: str
) -> None:
    error = RAISED[name]
    raising = f"{infer}\n        fail()" if hook == "a warm-up" else infer
    write(tmp_path / "m", hooked(raising, HOOKS.get(hook, ""), error))
    async with testing.serve(tmp_path, model_control_mode="explicit") as running, asyncio.timeout(SECONDS):
        server = running.server
        # A coroutine, or a property read in one, turns this one into an error of Python's own.
        error_name = "StopIteration" if name == "StopIteration" else error.partition("(")[0].rpartition(".")[2]
        with pytest.raises(triglot.ServingError, match=error_name):
            await server.manager.load_model("m")
        write(tmp_path / "m", hooked(infer))
        await server.manager.load_model("m")


@pytest.mark.both_transports(False)
@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("infer", INFERS)
async def test_what_a_close_raises_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, infer: str, name: str
) -> None:
    write(tmp_path / "m", hooked(infer, "close = fail", RAISED[name]))
    async with testing.serve(tmp_path, model_control_mode="explicit") as running, asyncio.timeout(SECONDS):
        server = running.server
        await server.manager.load_model("m")
        server.manager.unload_model("m")
        await until(lambda: "m version 1 failed to close" in caplog.text)
        await server.manager.load_model("m")
