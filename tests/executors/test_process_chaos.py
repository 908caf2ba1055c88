"""Processes that end, hang, or are ended, at every point of a call: its error, the next call, and what is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.direct_work import direct_stream
from tests.executors.reporting_models import (
    ON_LOOP,
    PLAIN,
    SECONDS,
    STREAM,
    Reporting,
    children,
    code,
    reporting,
    write_reporting,
)
from tests.waiting import until
from triglot import Call, Unavailable
from triglot.core.call import BatchCall
from triglot.core.errors import Code, DeadlineExceeded, ServingError
from triglot.core.response_buffer import STREAM_BUFFER
from triglot.executors.remote.pool import RestartPolicy

TWO_INSTANCES = "\nReporting.instances = 2\n"
WAIT = "(folder / f'in-{os.getpid()}').touch()\ntime.sleep(600)"
LOAD = (
    "\nplain = Reporting.load\ndef load(self, folder):\n    plain(self, folder)\n    {}\nReporting.load = load\n"
)
SLOW = LOAD.format("while len(list(folder.glob('in-*'))) and not (folder / 'open').exists(): time.sleep(0.005)")
"""Loads at once, and again only when the test says so."""
HELD = "ctypes.PyDLL(None).sleep(600)"
"""Holds the interpreter's lock, and does nothing."""


async def assert_still_serves(served: Reporting, *pids: int) -> None:
    """Another process runs the next call."""
    assert await served.pid() not in pids
    await until(lambda: served.readings()["processes"] == served.model.instances)
    assert served.readings()["processes_wanted"] == served.model.instances


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("os._exit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was terminated by SIGKILL \(out of memory\?\)"),
        ("os.abort()", "was terminated by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", r"sent no heartbeat for 0\.\d s and was killed"),
        (HELD, r"sent no heartbeat for 0\.\d s and was killed"),
        ("os.close(int(sys.orig_argv[-3]))", r"exited with status 1|closed its connection"),
    ],
)
async def test_a_process_is_lost_in_a_call(tmp_path: Path, text: str, why: str) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        with pytest.raises(Unavailable, match=f"^reporting: the process that ran the request ({why})$"):
            await served.run(text)
        await assert_still_serves(served, pid)
        readings = served.readings()
        assert readings["processes_lost hung"] == ("heartbeat" in why)
        assert readings["processes_lost ended"] == ("heartbeat" not in why)


def _lost(served: Reporting) -> float:
    readings = served.readings()
    return readings["processes_lost ended"] + readings["processes_lost hung"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_process_is_lost_while_idle(tmp_path: Path, number: signal.Signals) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        os.kill(pid, number)
        await until(lambda: _lost(served) == served.readings()["processes"] == 1 and served.model.alive)
        await assert_still_serves(served, pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_is_lost_in_a_batch(tmp_path: Path, number: signal.Signals) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        running = asyncio.ensure_future(served.run(WAIT, BatchCall([Call(), Call()])))
        await served.entered("in-")
        os.kill(pid, number)
        with pytest.raises(Unavailable, match="the process that ran the request"):
            await running
        await assert_still_serves(served, pid)


async def read_all(answers: AsyncIterator[object]) -> None:
    async for _ in answers:
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_is_lost_in_a_stream(tmp_path: Path, number: signal.Signals) -> None:
    async with reporting(tmp_path, STREAM) as served:
        answers = direct_stream(served.servable, code("os.getpid()", count=10**9), Call())
        first = await anext(answers)
        os.kill(int(first["said"].item()), number)
        with pytest.raises(Unavailable, match="the process that ran the request"):
            await asyncio.wait_for(read_all(answers), SECONDS)
        again = direct_stream(served.servable, code("os.getpid()", count=3), Call())
        pids = [int(answer["said"].item()) async for answer in again]
        assert len(pids) == 3
        assert int(first["said"].item()) not in pids


async def test_a_process_is_lost_while_another_model_answers(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        call = Call()

        async def reach(*_: object) -> object:
            os.kill(pid, signal.SIGKILL)
            return {"y": "late"}

        call.reach = reach
        pid = await served.pid()
        with pytest.raises(Unavailable, match="SIGKILL"):
            await served.run("call.infer('other', {})", call)
        await assert_still_serves(served, pid)


async def test_a_process_of_its_own_keeps_the_connection_open(tmp_path: Path) -> None:
    fork = "pid = os.fork()\nif not pid: time.sleep(600)\nself.state['pid'] = pid\nanswer = pid"
    async with reporting(tmp_path) as served:
        grandchild = int(await served.ask(fork))
        pid = await served.pid()
        try:
            running = asyncio.ensure_future(served.run(WAIT))
            await served.entered("in-")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="SIGKILL"):
                await running
        finally:
            os.kill(grandchild, signal.SIGKILL)
        await assert_still_serves(served, pid)


async def test_code_that_computes_is_not_taken_for_hung(tmp_path: Path) -> None:
    async with reporting(tmp_path, more="\nReporting.hang_seconds = 0.3\n") as served:
        pid = await served.pid()
        # One operation that holds the interpreter's lock all the while.
        assert await served.ask("3 ** 8_000_000 > 0") == "True"
        assert await served.pid() == pid


async def test_no_limit_on_silence(tmp_path: Path) -> None:
    async with reporting(tmp_path, more="\nReporting.hang_seconds = 0\n") as served:
        assert await served.ask("ctypes.PyDLL(None).sleep(2)") == "0"


LONGEST = "\nReporting.longest_run = 0.3\n"
TOO_LONG = r"^reporting: the (process|actor) that ran the request exceeded longest_run \(0\.3 s\) and was killed$"


@contextmanager
def unlimited(served: Reporting) -> Iterator[None]:
    """Meanwhile no call runs for too long, however busy the machine is."""
    pool = served.model._pool
    limit, pool.longest_run = pool.longest_run, 0.0
    try:
        yield
    finally:
        pool.longest_run = limit


@pytest.mark.parametrize("text", ["while True: pass", "threading.Event().wait()"])
async def test_a_call_that_runs_for_too_long(tmp_path: Path, text: str) -> None:
    async with reporting(tmp_path, more=LONGEST) as served:
        with unlimited(served):
            pid = await served.pid()
        with pytest.raises(Unavailable, match=TOO_LONG):
            await served.run(text)
        with unlimited(served):
            await assert_still_serves(served, pid)
        assert served.readings()["processes_lost hung"] == 1


async def test_a_stream_runs_for_too_long_only_while_its_reader_waits(tmp_path: Path) -> None:
    async with reporting(tmp_path, STREAM, more=LONGEST) as served:
        text = "os.getpid() if not (folder / 'hang').exists() else time.sleep(600)"
        answers = direct_stream(served.servable, code(text, count=10**9), Call())
        process = served.model._pool._slots[0].process
        assert process is not None
        with unlimited(served):
            pid = (await anext(answers))["said"].item()
            await until(lambda: served.files(f"made-{STREAM_BUFFER + 1}") and process.calls.run_seconds == 0)
        # As long as nobody takes its answers.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(served.changes.get(), 0.6)
        with unlimited(served):
            assert (await anext(answers))["said"].item() == pid
        (tmp_path / "hang").touch()
        with pytest.raises(Unavailable, match=TOO_LONG):
            await asyncio.wait_for(read_all(answers), SECONDS)


async def test_many_short_calls_are_not_a_long_one(tmp_path: Path) -> None:
    async with reporting(tmp_path, more="\nReporting.longest_run = 2\n") as served:
        end = time.monotonic() + 2.2
        while time.monotonic() < end:
            await served.pid()
        assert served.readings()["processes_lost hung"] == 0


# --- who runs what waits ---


async def test_the_other_processes_go_on(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=TWO_INSTANCES + SLOW) as served:
        lost = asyncio.ensure_future(served.run(WAIT))
        await served.entered("in-")
        pid = int(served.files("in-")[0].removeprefix("in-"))
        other = await served.pid()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await lost
        assert {await served.pid() for _ in range(20)} == {other}
        assert served.servable.alive
        assert served.changes.empty()
        (tmp_path / "open").touch()
        await assert_still_serves(served, pid)


# --- calls that may run again ---

IDEMPOTENT = "\nReporting.idempotent = True\n"
DIES = """
(folder / f"run-{os.getpid()}").touch()
if len(list(folder.glob("run-*"))) <= LOSSES: os.kill(os.getpid(), signal.SIGKILL)
answer = os.getpid()
"""


@pytest.mark.parametrize("infer", [PLAIN, ON_LOOP])
async def test_idempotent_call_runs_again_in_another_process(tmp_path: Path, infer: str) -> None:
    returns = "" if infer == PLAIN else "return answer"
    async with reporting(tmp_path, infer, more=IDEMPOTENT + TWO_INSTANCES) as served:
        answer = await served.ask(DIES.replace("LOSSES", "2") + returns)
        assert len(runs := served.files("run-")) == 3
        assert f"run-{answer}" in runs
        assert served.readings()["processes_lost ended"] == 2


async def test_an_idempotent_call_does_not_end_all_processes(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=IDEMPOTENT + TWO_INSTANCES) as served:
        with pytest.raises(Unavailable, match=r"that ran the request .*; the request was tried 3 times$"):
            await served.run(DIES.replace("LOSSES", "9"))
        assert len(served.files("run-")) == 3
        assert await served.ask("'next'") == "next"


async def test_an_idempotent_batch_runs_again(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=IDEMPOTENT) as served:
        text = DIES.replace("LOSSES", "1").replace("os.getpid()\n", "len(call.members)\n")
        assert await served.ask(text, BatchCall([Call(), Call()])) == "2"
        assert len(served.files("run-")) == 2


@pytest.mark.parametrize("leaves", ["call.cancel()", "call.limit(0.0, 'the test')"])
async def test_abandoned_call_does_not_run_again(tmp_path: Path, leaves: str) -> None:
    async with reporting(tmp_path, more=IDEMPOTENT) as served:
        call = Call()
        running = asyncio.ensure_future(
            served.run("(folder / f'run-{os.getpid()}').touch()\ntime.sleep(600)", call)
        )
        await served.entered("run-")
        exec(leaves, {"call": call})
        os.kill(int(served.files("run-")[0].removeprefix("run-")), signal.SIGKILL)
        with pytest.raises(ServingError):
            await running
        await served.pid()
        assert len(served.files("run-")) == 1


async def test_an_idempotent_stream_runs_again_unless_it_has_answered(tmp_path: Path) -> None:
    async with reporting(tmp_path, STREAM, more=IDEMPOTENT) as served:
        dies = DIES.replace("LOSSES", "1")
        read = [answer async for answer in direct_stream(served.servable, code(dies, count=3), Call())]
        assert read[2]["number"] == 2
        assert len(served.files("run-")) == 2
        answers = direct_stream(served.servable, code("os.getpid()", count=10**9), Call())
        os.kill(int((await anext(answers))["said"].item()), signal.SIGKILL)
        with pytest.raises(Unavailable, match="that ran the request"):
            await asyncio.wait_for(read_all(answers), SECONDS)


async def test_a_call_that_has_pushed_a_response_does_not_run_again(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=IDEMPOTENT) as served:
        pushes = "call.respond({'number': 1})\n" + DIES.replace("LOSSES", "1")
        with pytest.raises(Unavailable, match="that ran the request"):
            await asyncio.wait_for(read_all(direct_stream(served.servable, code(pushes), Call())), SECONDS)
        assert len(served.files("run-")) == 1


async def test_a_waiting_call_is_run_by_the_replacement(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=SLOW) as served:
        lost = asyncio.ensure_future(served.run(f"(folder / 'in-').touch()\n{HELD}"))
        await served.entered("in-")
        waiting = [asyncio.ensure_future(served.ask("'run'")) for _ in range(3)]
        with pytest.raises(Unavailable):
            await lost
        assert not served.servable.alive
        assert await served.changes.get() is False
        (tmp_path / "open").touch()
        assert await asyncio.gather(*waiting) == ["run"] * 3
        assert await served.changes.get() is True
        assert served.servable.alive


async def test_queued_call_ends_at_its_deadline_or_cancellation(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=SLOW) as served:
        with pytest.raises(Unavailable):
            await served.run("(folder / 'in-').touch()\nos._exit(0)")
        with pytest.raises(DeadlineExceeded):
            await served.run("1", Call(time.monotonic() + 0.05))
        call = Call()
        cancelled = asyncio.ensure_future(served.run("1", call))
        behind = asyncio.ensure_future(served.ask("'run'"))
        call.cancel()
        with pytest.raises(ServingError) as caught:
            await cancelled
        assert caught.value.code is Code.CANCELLED
        (tmp_path / "open").touch()
        assert await behind == "run"


async def test_what_cannot_be_replaced_is_unavailable_at_once_and_heals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(tmp_path) as served:
        source = (tmp_path / "model.py").read_text()
        write_reporting(tmp_path, more=LOAD.format("raise RuntimeError('no weights')"))
        with pytest.raises(Unavailable, match="exited with status 0"):
            await served.run("os._exit(0)")
        text = r"^reporting: its process was lost and could not be restarted: .*py:\d+: RuntimeError: no weights$"
        for _ in range(3):
            with pytest.raises(Unavailable, match=text) as caught:
                await served.run("1")
        assert (caught.value.retry_after or 0) >= 1
        await until(lambda: "could not be restarted, retrying in" in caplog.text)
        (tmp_path / "model.py").write_text(source)
        await until(lambda: served.model.alive)
        assert await served.ask("'healed'") == "healed"


async def test_each_replacement_waits_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with reporting(tmp_path, policy=RestartPolicy(first_delay=0.05, longest_delay=0.3)) as served:
        for _ in range(5):
            with pytest.raises(Unavailable):
                await served.run("os._exit(0)")
        delays = re.findall(r"exited with status 0; it is restarted in (\S+) s", caplog.text)
        assert [float(delay) for delay in delays] == pytest.approx([0.05, 0.1, 0.2, 0.3, 0.3], abs=0.06)
    steady = RestartPolicy(first_delay=0.05, longest_delay=0.3, steady=0.0)
    caplog.clear()
    async with reporting(tmp_path, policy=steady) as served:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await served.run("os._exit(0)")
        assert len(set(re.findall(r"it is restarted in (\S+) s", caplog.text))) == 1


# --- the end ---


async def test_a_call_that_does_not_end_is_ended_with_its_process(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=TWO_INSTANCES) as served:
        running = asyncio.ensure_future(served.run(WAIT))
        await served.entered("in-")
        await served.servable.close(at_once=True)
        with pytest.raises(Unavailable, match="ran a call that did not end before the unload timeout"):
            await running
        await until(lambda: not children())
        # The other one could close its model.
        await served.entered("closed-")
        assert len(served.files("closed-")) == 1


async def test_a_model_that_does_not_close_is_ended(tmp_path: Path) -> None:
    never = "\ndef close(self):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(600)\n"
    policy = RestartPolicy(end_timeout=0.1, kill_timeout=0.1)
    async with reporting(tmp_path, policy=policy, more=never + "Reporting.close = close\n") as served:
        assert await served.pid()
    assert children() == []


async def test_a_model_whose_close_fails_ends_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with reporting(tmp_path, more="\nReporting.close = lambda self: 1 / 0\n") as served:
        assert await served.pid()
    assert children() == []
    assert "ZeroDivisionError" in capfd.readouterr().err
