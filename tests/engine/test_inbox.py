"""From an instance's thread to the loop: whatever one result does there, the next ones arrive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from triglot.core.call import Call
from triglot.engine.inbox import LoopInbox
from triglot.engine.instance import Instance
from triglot.engine.queue import WorkQueue
from triglot.engine.work import Execution, Work, explained

SECONDS = 30.0


async def test_what_fails_to_be_received_holds_up_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    received: list[int] = []
    all_received = asyncio.Event()

    def receive(item: int) -> None:
        if item % 3 == 0:
            raise ValueError(f"no {item}")
        received.append(item)
        if item == 8:
            all_received.set()

    inbox = LoopInbox[int](asyncio.get_running_loop(), receive)

    # The loop does not run meanwhile: all of them wait for one wake-up.
    def put_all() -> None:
        for item in range(9):
            inbox.put(item)

    putting = threading.Thread(target=put_all)
    putting.start()
    putting.join()
    await asyncio.wait_for(all_received.wait(), SECONDS)
    assert received == [1, 2, 4, 5, 7, 8]
    assert [f"no {item}" in caplog.text for item in (0, 3, 6)] == [True] * 3


class FailsAtFirst(WorkQueue[Work]):
    """A schedule whose first looks for work fail."""

    failures = 3

    def take(self, _: int = 0) -> Work | None:
        if self.failures:
            self.failures -= 1
            raise MemoryError("no room to look")
        return super().take()


def run_at_once(function: Callable[[], None]) -> None:
    function()


async def test_a_schedule_that_fails_does_not_end_the_instance(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    schedule = FailsAtFirst(10, run_at_once)
    instance = Instance("m/1#0", 0, schedule, lambda inputs, _: inputs, lambda error: explained("m", error), loop)
    execution = Execution({}, Call(), loop.create_future())
    schedule.put(execution)
    assert await asyncio.wait_for(execution.future, SECONDS) == {}
    assert "no room to look" in caplog.text
    schedule.close()
    instance.join()
