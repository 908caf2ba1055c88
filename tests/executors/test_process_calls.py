"""Instances as processes: the same answers, errors and circumstances of a call as on a thread."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
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
    children,
    code,
    reporting,
)
from tests.recorded_calls import unsent_spans
from tests.waiting import until
from triglot import Call, NotFound, ServingError
from triglot.core.call import BatchCall, ModelCall
from triglot.core.errors import Code, Internal
from triglot.core.request_scheduling import Scheduling
from triglot.model.config import ModelConfig
from triglot.telemetry.spans.recorder import CallSpan

TWO = ModelConfig(parameters={"greeting": "hello"})
TWO_INSTANCES = "\nReporting.instances = 2\n"


async def test_each_instance_is_a_process_of_its_own(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=TWO_INSTANCES) as served:
        touch = "(folder / f'in-{os.getpid()}').touch()"
        gate = f"{touch}\nwhile len(list(folder.glob('in-*'))) < 2: time.sleep(0.005)"
        answers = await asyncio.gather(*(served.ask(f"{gate}\nanswer = os.getpid()") for _ in range(2)))
        assert len({*answers, str(os.getpid())}) == 3
        assert sorted(answers) == sorted(children())
        assert served.servable.alive
        assert served.readings()["processes"] == 2
    assert served.files("closed") == sorted(f"closed-{pid}" for pid in answers)
    assert children() == []


async def test_the_server_neither_makes_nor_loads_the_model(tmp_path: Path) -> None:
    seen = """
Reporting.__init__ = lambda self: (Path(__file__).parent / f"made-{os.getpid()}").touch()
"""
    async with reporting(tmp_path, more=seen) as served:
        assert served.files("made") == [f"made-{await served.pid()}"]


async def test_the_configuration_arrives(tmp_path: Path) -> None:
    async with reporting(tmp_path, config=TWO) as served:
        assert await served.ask("self.model_config.parameters['greeting']") == "hello"


MAPPED = """
Reporting.instances = 2
load = Reporting.load

def load_weights(self, folder):
    load(self, folder)
    self.weights = np.load(folder / "weights.npy", mmap_mode="r")
    self.weights.sum()

Reporting.load = load_weights
"""
SHARES = """
import re
_, text = Path("/proc/self/smaps").read_text().split("weights.npy", 1)
answer = [int(re.search(f"^{name}: +([0-9]+) kB", text, re.MULTILINE)[1]) for name in ("Rss", "Pss")]
"""


async def test_mapped_weights_are_in_memory_once(tmp_path: Path) -> None:
    weights = np.ones(1 << 20)
    np.save(tmp_path / "weights.npy", weights)
    async with reporting(tmp_path, more=MAPPED) as served:
        resident, share = json.loads(await served.ask(SHARES))
    assert resident >= weights.nbytes // 1024
    assert share <= resident / 2 + 64


# --- errors ---


async def test_a_serving_error_arrives_as_it_is(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        with pytest.raises(NotFound, match="no such tune") as caught:
            await served.run(
                "raise triglot.ServingError('no such tune', code=triglot.NotFound.code, retry_after=2.5)\n"
            )
        assert (caught.value.code, caught.value.retry_after) == (Code.NOT_FOUND, 2.5)


@pytest.mark.parametrize(
    ("text", "trace"),
    [
        ("{}['x']", "KeyError: 'x'"),
        ("exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("raise asyncio.CancelledError\n", "CancelledError"),
        ("(lambda again: again(again))(lambda again: again(again))", "RecursionError"),
    ],
)
async def test_any_other_exception_is_internal_and_the_process_continues(
    tmp_path: Path, text: str, trace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        with pytest.raises(
            Internal, match=r"reporting version 1 failed, error \w+; the server's log has the details"
        ):
            await served.run(text)
        assert trace in caplog.text
        assert "model.py" in caplog.text
        assert await served.pid() == pid


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "type(self).answer = lambda self, value: 3\n",
            r"'reporting' returned int, expected a dict of outputs by name",
        ),
        (
            "{'day': np.array('2026-01-01', 'M8[D]')}",
            r"'reporting' returned output 'day': numpy dtype datetime64\[D\]",
        ),
    ],
)
async def test_answers_that_are_none(tmp_path: Path, text: str, error: str) -> None:
    async with reporting(tmp_path) as served:
        with pytest.raises(Internal, match=error):
            await served.run(text)


# --- the call ---


async def test_what_a_model_may_ask_of_its_call(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        call = Call(time.monotonic() + SECONDS, lambda: [("A", "b"), ("C-bin", b"\xff")])
        call.request_id, call.signature_name, call.parameters = "seven", "other", {"a": 1, "b": "ü", "c": 0.5}
        call.scheduling = Scheduling(priority=3, sequence_id="s", sequence_start=True)
        call.model_name, call.model_version = "reporting", 4
        parts = "call.request_id, call.signature_name, call.parameters, call.scheduling, call.model_version"
        expected = ("seven", "other", {"a": 1, "b": "ü", "c": 0.5}, call.scheduling, 4)
        assert await served.ask(f"({parts})", call) == str(expected)
        assert await served.ask("str(call.metadata)", call) == str({"a": "b", "c-bin": b"\xff"})
        # A machine of its own has another clock; what that is behind is known but for a message's delay.
        assert float(await served.ask("call.deadline", call)) == pytest.approx(call.deadline, abs=1)
        assert 0 < float(await served.ask("call.remaining", call)) < SECONDS
        assert await served.ask("(call.deadline, call.expired, call.cancelled, len(call.members))") == str(
            (None, False, False, 1)
        )


@pytest.mark.parametrize(("infer", "read"), [(PLAIN, "{}"), (ON_LOOP, "return {}")])
async def test_the_trace_context_of_a_call(tmp_path: Path, infer: str, read: str) -> None:
    sent = f"00-{'ab' * 16}-{'12' * 8}-01"
    async with reporting(tmp_path, infer) as served:
        context = read.format("(call.traceparent, call.tracestate)")
        call = Call(read_metadata=lambda: [("Traceparent", sent), ("tracestate", "a=1")])
        assert await served.ask(context, call) == str((sent, "a=1"))
        call.execution_started(0.0)
        call.span = CallSpan(unsent_spans(), call, "ab" * 16, "", 1, "b=2")
        own = call.span.traceparent
        assert await served.ask(context, call) == str((own, "b=2"))
        assert await served.ask(context, Call()) == str(("", ""))
        batch = BatchCall([call, Call(read_metadata=lambda: [("traceparent", sent)])])
        assert await served.ask(read.format("[one.traceparent for one in call.members]"), batch) == str(
            [own, sent]
        )


async def test_members_of_a_batch(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        members = [Call(time.monotonic() + SECONDS), Call()]
        for number, member in enumerate(members):
            member.request_id = f"r{number}"
        text = "[(member.request_id, member.deadline is None) for member in call.members]"
        assert await served.ask(text, BatchCall(members)) == str([("r0", False), ("r1", True)])


async def test_a_model_sees_that_its_call_is_cancelled(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        call = Call()
        seen = "(folder / 'in').touch()\nwhile not call.cancelled: time.sleep(0.005)\nanswer = 'seen'"
        running = asyncio.ensure_future(served.ask(seen, call))
        await served.entered("in")
        call.cancel()
        assert await running == "seen"
        assert await served.ask("call.cancelled") == "False"


async def test_async_code_is_cancelled_with_its_call(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        assert await served.ask("await asyncio.sleep(0)\nreturn 'slept'") == "slept"
        call = Call()
        running = asyncio.ensure_future(served.ask("(folder / 'in').touch()\nawait asyncio.sleep(600)", call))
        await served.entered("in")
        (tmp_path / "ended").unlink()
        call.cancel()
        with pytest.raises(ServingError, match="cancelled while the model ran") as caught:
            await running
        assert caught.value.code is Code.CANCELLED
        assert (tmp_path / "ended").exists()
        assert await served.ask("return 'next'") == "next"


class Other:
    """Another model, as the server lets a call reach it: doubles `x`, or refuses; streams count down from it."""

    def __init__(self) -> None:
        self.closed = False

    def __call__(self, call: Call, wanted: ModelCall) -> Any:
        return self.count_up(wanted.inputs["x"]) if wanted.stream else self.answer(call, wanted)

    async def answer(self, call: Call, wanted: ModelCall) -> Any:
        if wanted.model != "double":
            raise ServingError(f"no model {wanted.model}", code=Code.NOT_FOUND)
        assert (wanted.version, wanted.parameters, call.request_id) == ("3", {"a": 1}, "outer")
        return {"y": wanted.inputs["x"] * 2}

    async def count_up(self, x: Any) -> AsyncIterator[Any]:
        try:
            for value in range(int(x), 0, -1):
                yield {"y": np.array(value)}
        finally:
            self.closed = True


CALLS = "call.infer('double', {'x': inputs['x']}, version='3', parameters={'a': 1})"
TAKES = "call.infer_stream('double', {'x': inputs['x']})"


@pytest.mark.parametrize("size", [3, 100_000])
async def test_a_model_calls_another(tmp_path: Path, size: int) -> None:
    async with reporting(tmp_path) as served:
        call, x = Call(), np.arange(size, dtype=np.float32)
        call.reach, call.request_id = Other(), "outer"
        for _ in range(3):
            assert ((await served.run(CALLS, call, x=x))["y"] == 2 * x).all()
        with pytest.raises(ServingError, match="no model triple") as caught:
            await served.run("call.infer('triple', inputs)", call, x=x)
        assert caught.value.code is Code.NOT_FOUND


async def test_a_model_reads_anothers_stream(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        call, other = Call(), Other()
        call.reach = other
        assert await served.ask(f"[int(one['y']) for one in {TAKES}]", call, x=4) == "[4, 3, 2, 1]"
        other.closed = False
        assert await served.ask(f"int(next({TAKES})['y'])", call, x=4) == "4"
        await until(lambda: other.closed)
        both = f"[(int(one['y']), int(other['y'])) for one, other in zip({TAKES}, {TAKES})]"
        assert await served.ask(both, call, x=2) == "[(2, 2), (1, 1)]"


async def test_async_code_calls_others(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call = Call()
        call.reach, call.request_id = Other(), "outer"
        assert await served.ask(f"return int((await {CALLS})['y'])", call, x=4) == "8"
        assert await served.ask(f"return [int(one['y']) async for one in {TAKES}]", call, x=3) == "[3, 2, 1]"
        with pytest.raises(ServingError, match="no model triple"):
            await served.run("return await call.infer('triple', inputs)", call, x=4)


# --- streams ---


async def read(served: Any, text: str, call: Call | None = None, count: int = 3) -> list[int]:
    answers = direct_stream(served.servable, code(text, count=count), call or Call())
    return [int(answer["number"]) async for answer in answers]


@pytest.mark.parametrize("infer", [STREAM, STREAM_ON_LOOP])
async def test_a_stream(tmp_path: Path, infer: str) -> None:
    async with reporting(tmp_path, infer) as served:
        assert served.servable.decoupled
        assert await read(served, "1", count=100) == list(range(100))
        assert await read(served, "1", count=0) == []
        with pytest.raises(ServingError, match="three"):
            await read(
                served, "answer = 1 if 'number' not in self.state else None\nraise triglot.NotFound('three')"
            )
        assert await read(served, "1") == [0, 1, 2]


@pytest.mark.parametrize("infer", [STREAM, STREAM_ON_LOOP])
async def test_closing_a_stream_closes_the_models_generator(tmp_path: Path, infer: str) -> None:
    async with reporting(tmp_path, infer) as served:
        answers = direct_stream(served.servable, code("np.zeros(50_000)[0]", count=10**9), Call())
        assert int((await anext(answers))["number"]) == 0
        assert not (tmp_path / "ended").exists()
        await answers.aclose()
        await served.entered("ended")
        assert await read(served, "1") == [0, 1, 2]


async def test_a_slow_reader_holds_the_model_up(tmp_path: Path) -> None:
    async with reporting(tmp_path, STREAM) as served:
        answers = direct_stream(served.servable, code("1", count=10_000), Call())
        await anext(answers)
        await served.entered("made-30")
        # Nobody reads: what is on its way is bounded, whatever time it has.
        made = -1
        while made != (now := len(served.files("made"))):
            made = now
            await asyncio.sleep(0.3)
        assert made < 50
        await answers.aclose()


async def test_a_plain_function_pushes_its_answers(tmp_path: Path) -> None:
    pushes = """
def push():
    self.state["sent"] = [call.respond({"number": np.array(number)}) for number in range(40)]
thread = threading.Thread(target=push)
thread.start()
thread.join()
call.finish()
self.state["late"] = call.respond({"number": np.array(99)})
answer = None"""
    async with reporting(tmp_path) as served:
        assert await read(served, pushes) == list(range(40))
        assert await served.ask("(all(self.state['sent']), self.state['late'])") == str((True, False))


async def test_pushed_responses_of_a_unary_call_are_discarded(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        assert await served.ask("[call.respond({'number': 1}) for _ in range(3)]") == str([False] * 3)
