"""Whatever a model's own code raises: each call has its answer, and the server continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import triglot
from tests.transports.live import Live, live, request
from tests.waiting import until
from triglot import testing
from triglot.core.errors import Code
from triglot.core.tensor import Array

pytestmark = pytest.mark.both_transports
SECONDS = 20.0
REQUEST = request("m", b"\0\0\x80\x3f", shape=(1,))


class Own(BaseException):
    """One that code of a user's may have."""


class AsksForTwo(triglot.ServingError):
    code = Code.FAILED_PRECONDITION

    def __new__(cls, _: str, __: str) -> AsksForTwo:
        return super().__new__(cls)

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class WithoutText(triglot.ServingError):
    def __init__(self) -> None:
        Exception.__init__(self)


class FailingText(WithoutText):
    message = property(lambda self: self.args[1])


class Undescribed(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


def hinting(hint: Any) -> triglot.ServingError:
    error = triglot.FailedPrecondition("odd")
    error.retry_after = hint
    return error


def with_code(code: Any) -> triglot.ServingError:
    return triglot.ServingError("odd", code=code)


ALWAYS_THE_SAME = triglot.FailedPrecondition("always the same")
ERRORS: Mapping[str, BaseException] = {
    "GeneratorExit": GeneratorExit(),
    "StopIteration": StopIteration(3),
    "StopAsyncIteration": StopAsyncIteration(),
    "CancelledError": asyncio.CancelledError(),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
    "BaseException": Own(),
    "its own __new__": AsksForTwo("two", "words"),
    "no text": WithoutText(),
    "a text that fails": FailingText(),
    "the code OK": with_code(Code.OK),
    "no code": with_code(99),
    "no description": Undescribed(),
    "frozen": Frozen("frozen"),
    "a hint that is none": hinting("soon"),
    "a hint without end": hinting(float("inf")),
    "one for all": ALWAYS_THE_SAME,
}
"""Each is raised by all calls."""
FAILED_PRECONDITION = ("its own __new__", "one for all")
"""Those that clients get as they are; the others are INTERNAL."""


class Raises(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    max_batch_size = 8

    def __init__(self, batching: triglot.DynamicBatching | None = None) -> None:
        self.error: BaseException | None = None
        self.dynamic_batching = batching

    def answer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self.error is not None:
            raise self.error
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


class Lists(Plain):
    """Takes the requests of a batch as a list."""

    def infer_batch(self, requests: list[Any], calls: list[Any]) -> list[dict[str, Array]]:
        return [self.answer(request) for request in requests]


class CallsAnother(triglot.Model):
    inputs, outputs = Raises.inputs, Raises.outputs

    async def infer(self, inputs: Mapping[str, Array], call: triglot.Call) -> Any:
        return await call.infer("m", inputs)


class Ensemble(triglot.Ensemble):
    inputs, outputs = Raises.inputs, Raises.outputs
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


async def unary(server: Live, model: str) -> list[tuple[grpc.StatusCode, str]]:
    """The codes and texts of two calls at the same time: with batching these two make a batch."""
    data = request(model, b"\0\0\x80\x3f", shape=(1,))
    calls = [server.infer(data, timeout=SECONDS) for _ in range(2)]
    return [(await call.code(), await call.details()) for call in calls]


async def streamed(server: Live) -> list[str]:
    """The errors of a stream's answers to two requests."""
    return [answer.error_message async for answer in server.stream_infer(iter([REQUEST] * 2), timeout=SECONDS)]


async def posted(server: Live) -> int:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    async with server.session.post(f"{server.url}/models/m/infer", json={"inputs": [tensor]}) as response:
        return response.status


@pytest.mark.parametrize("kind", KINDS)
async def test_its_calls_fail_and_the_next_are_answered(kind: str) -> None:
    model = KINDS[kind]()
    others = {} if "generator" in kind else {"calls": CallsAnother(), "ensemble": Ensemble()}
    async with live({"m": model, **others}) as server:
        for name, error in ERRORS.items():
            code, status = grpc.StatusCode.INTERNAL, 500
            if name in FAILED_PRECONDITION:
                code, status = grpc.StatusCode.FAILED_PRECONDITION, 400
            model.error = error
            texts = await streamed(server)
            assert len(texts) == 2, name
            expected = "" if isinstance(error, triglot.ServingError) else " failed, error "
            assert all(text and expected in text for text in texts), (name, texts)
            for other in ("m", *others) if others else ():
                assert [got for got, _ in await unary(server, other)] == [code] * 2, (name, other)
            if others:
                async with asyncio.timeout(SECONDS):
                    statuses = await asyncio.gather(posted(server), posted(server))
                assert [*statuses] == [status, status], name
            assert server.leases() == 0
            model.error = None
            assert await streamed(server) == ["", ""], name
            for other in ("m", *others) if others else ():
                assert [got for got, _ in await unary(server, other)] == [grpc.StatusCode.OK] * 2, (name, other)


async def test_an_error_that_is_raised_again_says_the_same_each_time() -> None:
    model = Plain()
    model.error = ALWAYS_THE_SAME
    async with live({"m": model, "asks": Ensemble()}) as server:
        texts = {text for _ in range(3) for _, text in await unary(server, "asks")}
        assert texts == {"in ensemble 'asks', model 'm': always the same"}
        assert [text for _, text in await unary(server, "m")] == ["always the same"] * 2


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
RAISED = {name: f"{name}(3)" for name in ("GeneratorExit", "StopIteration", "StopAsyncIteration")} | {
    "CancelledError": "asyncio.CancelledError(3)",
    "KeyboardInterrupt": "KeyboardInterrupt(3)",
    "SystemExit": "SystemExit(3)",
    "Own": "Own(3)",
}
"""What is raised, by the name that is reported: a coroutine, or a property read in one, would turn a StopIteration
into an error of Python's own."""


def write(folder: Path, infer: str, hook: str = "", error: str = "ValueError") -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(WARM_UP)
    (folder / "1" / "model.py").write_text(HOOKED.format(error=error, infer=infer, hook=hook))


@pytest.mark.both_transports(False)
@pytest.mark.parametrize("hook", [*HOOKS, "a warm-up"])
@pytest.mark.parametrize("infer", INFERS)
async def test_exception_of_a_load_is_reported_and_the_next_model_loads(
    tmp_path: Path, infer: str, hook: str
) -> None:
    raising = f"{infer}\n        fail()" if hook == "a warm-up" else infer
    async with testing.serve(tmp_path, model_control_mode="explicit") as running, asyncio.timeout(2 * SECONDS):
        for name, error in RAISED.items():
            write(tmp_path / name, raising, HOOKS.get(hook, ""), error)
            with pytest.raises(triglot.ServingError, match=name):
                await running.server.manager.load_model(name)
            write(tmp_path / name, infer)
            await running.server.manager.load_model(name)


@pytest.mark.both_transports(False)
@pytest.mark.parametrize("infer", INFERS)
async def test_what_a_close_raises_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, infer: str
) -> None:
    async with testing.serve(tmp_path, model_control_mode="explicit") as running, asyncio.timeout(2 * SECONDS):
        manager = running.server.manager
        for name, error in RAISED.items():
            write(tmp_path / name, infer, "close = fail", error)
            await manager.load_model(name)
            manager.unload_model(name)
            failed = f"{name} version 1 failed to close"
            await until(lambda: failed in caplog.text)  # noqa: B023 - it is not called later
            await manager.load_model(name)
