"""The thread that looks after a model's processes: whatever fails there, it continues."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.executors.reporting_models import Reporting, reporting
from tests.waiting import until
from triglot import Unavailable

TWO_INSTANCES = "\nReporting.instances = 2\n"


def process_of(served: Reporting, number: int) -> Any:
    return served.model._pool._slots[number].process


async def test_a_process_that_cannot_be_checked_keeps_no_other_from_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(tmp_path, more=TWO_INSTANCES) as served:
        first, second = (process_of(served, number).body.pid for number in (0, 1))
        process_of(served, 0).heartbeat = None
        await until(lambda: "'NoneType' object has no attribute 'check'" in caplog.text)
        os.kill(second, signal.SIGKILL)
        await until(lambda: served.readings()["processes_lost ended"] == 1 and served.readings()["processes"] == 2)
        assert process_of(served, 0).body.pid == first
        os.kill(first, signal.SIGKILL)
        await until(lambda: served.readings()["processes_lost ended"] == 2 and served.readings()["processes"] == 2)
        assert await served.ask("'run'") == "run"
        # Ten times a second, as long as it lasts, would fill the disk.
        assert caplog.text.count("a check failed") == 1


@pytest.mark.parametrize("failing", ["start", "fork"])
async def test_a_replacement_that_cannot_be_begun_is_tried_again(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(tmp_path) as served:
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
            monkeypatch.setattr("triglot.executors.process.environment._spawned", fork)
        with pytest.raises(Unavailable):
            await served.run("os._exit(0)")
        with pytest.raises(Unavailable, match="could not be restarted: can't start new"):
            await served.run("1")
        await until(lambda: "retrying in" in caplog.text)
        may.set()
        monkeypatch.undo()
        await until(lambda: served.model.alive)
        assert await served.ask("'healed'") == "healed"
