"""Deadlines of many calls with one timer of the loop."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from tests.waiting import until
from triglot.core.call import STALE_TICKS, TICKS, TimerWheel

SOON = 0.02


class Entry:
    """Notes when it has expired."""

    def __init__(self, *, fails: bool = False) -> None:
        self.expired: list[float] = []
        self._fails = fails

    def expire(self) -> None:
        self.expired.append(time.monotonic())
        if self._fails:
            raise ValueError("on purpose")


async def test_each_expires_once_and_not_before_its_deadline() -> None:
    wheel = TimerWheel(asyncio.get_running_loop())
    now = time.monotonic()
    # The later ones first: an earlier deadline is not to wait for the timer of a later one.
    deadlines = [now + 2 * SOON, now + SOON, now + SOON, now + 3 * SOON, now - 1]
    entries = [Entry() for _ in deadlines]
    for entry, deadline in zip(entries, deadlines, strict=True):
        wheel.add(entry, deadline)
    assert len(wheel) == len(entries)
    await until(lambda: all(entry.expired for entry in entries))
    for entry, deadline in zip(entries, deadlines, strict=True):
        assert len(entry.expired) == 1
        assert entry.expired[0] >= deadline
    assert len(wheel) == 0
    later = Entry()
    wheel.add(later, time.monotonic() + SOON)
    await until(lambda: bool(later.expired))


async def test_what_is_discarded_does_not_expire() -> None:
    wheel = TimerWheel(asyncio.get_running_loop())
    deadline = time.monotonic() + SOON
    discarded, same_tick, last = Entry(), Entry(), Entry()
    tick = wheel.add(discarded, deadline)
    wheel.add(same_tick, deadline)
    wheel.add(last, deadline + SOON)
    wheel.discard(discarded, tick)
    wheel.discard(discarded, tick)
    await until(lambda: bool(last.expired))
    assert same_tick.expired
    assert not discarded.expired


async def test_one_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    wheel = TimerWheel(asyncio.get_running_loop())
    deadline = time.monotonic() + SOON
    entries = [Entry(fails=True), Entry(fails=True), Entry()]
    for entry in entries:
        wheel.add(entry, deadline)
    last = Entry()
    wheel.add(last, deadline + SOON)
    with caplog.at_level(logging.ERROR):
        await until(lambda: bool(last.expired))
    assert all(entry.expired for entry in entries)
    assert caplog.text.count("ValueError: on purpose") == 2


async def test_far_deadlines_of_calls_that_ended_leave_little() -> None:
    """Each of these has a tick of its own."""
    wheel = TimerWheel(asyncio.get_running_loop())
    now = time.monotonic()
    for number in range(10 * STALE_TICKS):
        entry = Entry()
        wheel.discard(entry, wheel.add(entry, now + 3600 + number / TICKS))
    assert len(wheel) == 0
    assert len(wheel._due) <= STALE_TICKS + 1
