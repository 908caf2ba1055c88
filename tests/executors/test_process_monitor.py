"""The thread that looks after a model's processes: whatever fails there, it goes on."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from told_models import SECONDS, Told, told

from triglot import Unavailable
from triglot.executors.remote.pool import ProcessMonitor
from waiting import until

TWO_INSTANCES = "\nTold.instances = 2\n"


def monitor_that(*checks: Callable[[], object]) -> ProcessMonitor:
    return ProcessMonitor("monitor", lambda: checks)


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), MemoryError()])
def test_a_check_that_fails_is_logged_and_the_others_are_made(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    made: queue.Queue[int] = queue.Queue()

    def fail() -> None:
        raise error

    monitor = monitor_that(fail, lambda: made.put(1))
    for _ in range(3):
        assert made.get(timeout=SECONDS) == 1
    assert monitor.do(lambda: "done") == "done"
    monitor.end()
    assert caplog.text.count(type(error).__name__) >= 1
    # Ten times a second, as long as it lasts, would fill the disk.
    assert len(caplog.records) <= 2


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)])
def test_an_order_that_fails_raises_where_it_was_given(error: BaseException) -> None:
    monitor = monitor_that()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        monitor.do(fail)
    assert monitor.do(lambda: 5) == 5
    monitor.end()


def test_orders_after_the_end_are_refused() -> None:
    monitor = monitor_that()
    monitor.end()
    with pytest.raises(OSError, match="the thread that watches processes has ended"):
        monitor.do(lambda: 5)


def process_of(one: Told, number: int) -> Any:
    return one.model._pool._slots[number].process


async def test_a_process_that_cannot_be_checked_keeps_no_other_from_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with told(tmp_path, more=TWO_INSTANCES) as one:
        first, second = (process_of(one, number).body.pid for number in (0, 1))
        process_of(one, 0).heartbeat = None
        await until(lambda: "'NoneType' object has no attribute 'check'" in caplog.text)
        os.kill(second, signal.SIGKILL)
        await until(lambda: one.readings()["processes_lost ended"] == 1 and one.readings()["processes"] == 2)
        assert process_of(one, 0).body.pid == first
        os.kill(first, signal.SIGKILL)
        await until(lambda: one.readings()["processes_lost ended"] == 2 and one.readings()["processes"] == 2)
        assert await one.say("'run'") == "run"


@pytest.mark.parametrize("failing", ["start", "fork"])
async def test_a_replacement_that_cannot_be_begun_is_tried_again(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with told(tmp_path) as one:
        may, plain = threading.Event(), threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.endswith("loads again") and not may.is_set():
                raise RuntimeError("can't start new thread")
            plain(thread)

        def fork(*_: object) -> Any:
            raise MemoryError("can't start new process")

        if failing == "start":
            monkeypatch.setattr(threading.Thread, "start", start)
        else:
            monkeypatch.setattr("triglot.executors.process.body._spawned", fork)
        with pytest.raises(Unavailable):
            await one.run("os._exit(0)")
        with pytest.raises(Unavailable, match="could not be restarted: can't start new"):
            await one.run("1")
        await until(lambda: "retrying in" in caplog.text)
        may.set()
        monkeypatch.undo()
        await until(lambda: one.model.alive)
        assert await one.say("'healed'") == "healed"
