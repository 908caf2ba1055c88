"""Whatever a model raises in its process: its call is answered as on a thread, and the process continues."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_stream
from tests.executors.reporting_models import (
    ON_LOOP,
    PLAIN,
    SECONDS,
    STREAM,
    STREAM_ON_LOOP,
    Reporting,
    code,
    load,
    reporting,
    write_reporting,
)
from triglot import Call, Internal, ModelLoadError, ServingError, Unavailable
from triglot.core.errors import Code
from triglot.executors.remote import frames

CLASSES = """
import dataclasses
from triglot.core.errors import Code
from triglot.executors.remote import frames

class AsksForTwo(triglot.ServingError):
    code = Code.FAILED_PRECONDITION
    def __new__(cls, _, __):
        return super().__new__(cls)
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")

class WithoutText(triglot.ServingError):
    def __init__(self):
        Exception.__init__(self)

class FailingText(triglot.ServingError):
    message = property(lambda self: self.args[1])
    def __init__(self):
        Exception.__init__(self)

class Undescribed(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Own(BaseException):
    pass

@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str = "frozen"

def hinting(hint):
    error = triglot.ServingError("odd", code=Code.NOT_FOUND)
    error.retry_after = hint
    return error

def circle():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one
"""
ODD = {
    "AsksForTwo('two', 'words')": Code.FAILED_PRECONDITION,
    "WithoutText()": Code.INTERNAL,
    "FailingText()": Code.INTERNAL,
    "Undescribed()": Code.INTERNAL,
    "Frozen()": Code.INTERNAL,
    "circle()": Code.INTERNAL,
    "triglot.ServingError('odd', code=Code.OK)": Code.INTERNAL,
    "triglot.ServingError('odd', code=99)": Code.INTERNAL,
    "hinting('soon')": Code.INTERNAL,
    "hinting(2.5)": Code.NOT_FOUND,
    "SystemExit(3)": Code.INTERNAL,
    "KeyboardInterrupt()": Code.INTERNAL,
    "GeneratorExit()": Code.INTERNAL,
    "StopIteration()": Code.INTERNAL,
    "StopAsyncIteration()": Code.INTERNAL,
    "Own()": Code.INTERNAL,
    "asyncio.CancelledError()": Code.INTERNAL,
}


async def outcome(served: Reporting, text: str) -> Code:
    with pytest.raises(ServingError) as caught:
        await (asyncio.wait_for(read(served, text), SECONDS) if served.servable.decoupled else served.run(text))
    return caught.value.code


async def read(served: Reporting, text: str) -> None:
    async for _ in direct_stream(served.servable, code(text, count=2), Call()):
        pass


@pytest.mark.parametrize("infer", [PLAIN, ON_LOOP, STREAM, STREAM_ON_LOOP])
async def test_an_odd_error_fails_its_call_and_nothing_else(tmp_path: Path, infer: str) -> None:
    async with reporting(tmp_path, infer, more=CLASSES) as served:
        assert {error: await outcome(served, f"raise {error}\n") for error in ODD} == ODD
        assert served.readings() == {
            "processes": 1,
            "processes_wanted": 1,
            "processes_lost ended": 0,
            "processes_lost hung": 0,
        }


async def test_an_error_without_a_description_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(tmp_path, more=CLASSES) as served:
        await outcome(served, "raise Undescribed()\n")
    assert "Undescribed: <its __str__ has raised RuntimeError>" in caplog.text
    assert "model.py" in caplog.text


async def test_a_load_error_of_the_models_own_without_a_code(tmp_path: Path) -> None:
    own = "class Own(triglot.ModelLoadError):\n    def __init__(self): self.__cause__ = self\nraise Own()\n"
    with pytest.raises(ModelLoadError) as caught:
        await asyncio.to_thread(load, write_reporting(tmp_path, more=own))
    assert caught.value.code is Code.UNKNOWN


# --- the loop of `async def` code ---


@pytest.mark.parametrize(
    "text",
    [
        "asyncio.get_running_loop().call_soon(exit, 3)",
        "one = asyncio.create_task(asyncio.to_thread(exit, 3))\nawait asyncio.wait([one])",
        "asyncio.get_running_loop().stop()",
    ],
)
async def test_the_loop_survives_what_ends_loops(tmp_path: Path, text: str) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        code = f"{text}\nawait asyncio.sleep(0)\nreturn os.getpid()"
        assert await served.ask(code) == await served.ask("return os.getpid()")


async def test_a_loop_that_cannot_go_on_is_lost_with_its_process(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        with pytest.raises(Unavailable, match="exited with status 1"):
            await served.run("asyncio.get_running_loop()._selector.close()\nawait asyncio.sleep(600)")
        assert await served.ask("return 'next'") == "next"


async def test_a_task_factory_that_fails(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        await served.run("asyncio.get_running_loop().set_task_factory(lambda *_, **__: 1 / 0)\nreturn 'set'")
        assert await outcome(served, "return 'never'") is Code.INTERNAL


# --- errors that spoil the process ---

LOST = {
    "AcceleratorError('CUDA error: device-side assert triggered\\nSearch for `cudaErrorAssert` in')": True,
    "RuntimeError('CUDA error: an illegal memory access was encountered')": True,
    "CUDARuntimeError('cudaErrorAssert: device-side assert triggered')": True,
    "AcceleratorError('CUDA error: invalid device ordinal')": False,
    "RuntimeError('CUDA out of memory. Tried to allocate 1024.00 GiB.')": False,
    "ValueError('expected no CUDA error: misaligned address')": False,
}
LIBRARIES = """
class AcceleratorError(RuntimeError):
    pass

class CUDARuntimeError(RuntimeError):
    pass

def fail(error):
    raise error

def fail_because_of(error):
    try:
        raise error
    except Exception:
        raise triglot.Internal("failed") from None
"""


@pytest.mark.parametrize("infer", [PLAIN, ON_LOOP], ids=["plain", "loop"])
@pytest.mark.parametrize(("error", "is_lost"), LOST.items())
async def test_a_process_that_has_lost_cuda_is_replaced(
    tmp_path: Path, infer: str, error: str, is_lost: bool
) -> None:
    """The exceptions are those of PyTorch and CuPy, by name and text."""
    pid = "os.getpid()" if infer is PLAIN else "return os.getpid()"
    async with reporting(tmp_path, infer, more=LIBRARIES) as served:
        for text in (f"fail({error})", f"fail_because_of({error})"):
            before = await served.ask(pid)
            with pytest.raises(Internal):
                await served.run(text)
            assert (await served.ask(pid) != before) is is_lost


async def test_a_stream_that_loses_cuda(tmp_path: Path) -> None:
    async with reporting(tmp_path, STREAM, more=LIBRARIES) as served:
        for _ in range(2):
            with pytest.raises(Internal):
                await asyncio.wait_for(read(served, f"fail({next(iter(LOST))})"), SECONDS)
        assert served.readings()["processes_lost ended"] >= 1


# --- who may answer ---


async def test_a_fork_of_the_process_answers_nothing(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        forks = "pid = os.fork()\nanswer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 'fork'"
        pid = await served.pid()
        assert await served.ask(forks) == "1"
        assert await served.pid() == pid


async def test_an_answer_to_another_call_is_nobodys(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        other = "frames.pack(frames.Frame(frames.Kind.DONE, 10**6, places=()))"
        write = f"os.write(int(sys.orig_argv[-3]), {other})"
        text = f"from triglot.executors.remote import frames\n{write}\ntime.sleep(600)"
        with pytest.raises(Unavailable, match="sent a response to an unknown call; process killed"):
            await served.run(text)
        assert await served.ask("'next'") == "next"


# --- what no frame can carry ---

MUCH = ["{'y' * 70_000: np.ones(1)}", "{str(number): np.ones(1) for number in range(70_000)}"]
TOO_MUCH = "[frames.__setattr__('MAX_FRAME', 10_000), {'y' * 70_000: np.ones(1)}][1]"
FRAMES = "\nfrom triglot.executors.remote import frames\n"


@pytest.mark.parametrize("text", MUCH)
async def test_long_names_and_many_outputs_arrive(tmp_path: Path, text: str) -> None:
    async with reporting(tmp_path) as served:
        assert (await served.run(text)).keys() == eval(text, {"np": np}).keys()


async def test_answers_that_no_frame_can_carry(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=FRAMES) as served:
        pid = await served.pid()
        with pytest.raises(
            Internal, match="model 'reporting' returned outputs that cannot be sent to the server: "
        ):
            await served.run(TOO_MUCH, x=np.zeros(50_000))
        assert await served.pid() == pid
    async with reporting(tmp_path / "stream", STREAM, more=FRAMES) as served:
        assert await outcome(served, TOO_MUCH) is Code.INTERNAL
        assert served.readings()["processes"] == 1


HUGE = ["np.broadcast_to(np.int8(1), (2**40,))", "np.broadcast_to(np.array('x', object), (2**40,))"]


@pytest.mark.parametrize("text", HUGE)
async def test_tensors_larger_than_memory(tmp_path: Path, text: str) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        # The server's log says what was too large.
        with pytest.raises(Internal):
            await served.run("{'y': " + text + "}")
        assert await served.pid() == pid
        with pytest.raises(Internal):
            await served.run("1", x=eval(text, {"np": np}))
        call = Call()

        async def reach(*_: object) -> Any:
            return {"y": eval(text, {"np": np})}

        call.reach = reach
        with pytest.raises(Internal, match="do not fit into shared memory:"):
            await served.run("call.infer('other', {})", call)
        with pytest.raises(Internal):
            await served.run("call.infer('other', {'x': " + text + "})", call)
        assert await served.pid() == pid
        assert served.readings()["processes_lost ended"] == 0


async def test_another_models_answer_that_no_frame_can_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reporting(tmp_path) as served:
        call = Call()

        async def reach(*_: object) -> Any:
            return {"y" * 70_000: np.ones(1)}

        call.reach = reach
        pid = await served.pid()
        monkeypatch.setattr(frames, "MAX_FRAME", 10_000)
        with pytest.raises(Internal, match="the response cannot be sent to the process: "):
            await served.run("call.infer('other', {})", call)
        assert await served.pid() == pid


async def test_another_models_odd_error(tmp_path: Path) -> None:
    class Undescribed(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async with reporting(tmp_path) as served:
        call = Call()
        pid = await served.pid()
        for error in (Undescribed(), ServingError("odd", code=99)):  # type: ignore[arg-type]

            async def reach(*_: object, error: Exception = error) -> Any:
                raise error

            call.reach = reach
            with pytest.raises(Internal, match=type(error).__name__):
                await served.run("call.infer('other', {})", call)
        assert await served.pid() == pid
