"""LoadLock: one at a time, and no holder waits for ever."""

from __future__ import annotations

import asyncio

from scripted_loads import SECONDS

from triglot.repository.manager.reconciler import LoadLock
from waiting import until

LONG = 3600.0


class Holder:
    """Takes its turn, and keeps it until the test ends it."""

    def __init__(self, turns: LoadLock) -> None:
        self.has_it = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._hold(turns))

    async def _hold(self, turns: LoadLock) -> None:
        async with turns.hold():
            self.has_it.set()
            await self.end.wait()

    async def wait_ended(self) -> None:
        self.end.set()
        await asyncio.wait_for(self.task, SECONDS)


async def test_one_at_a_time_in_the_order_that_they_came() -> None:
    turns = LoadLock(LONG)
    holders = [Holder(turns) for _ in range(3)]
    for number, holder in enumerate(holders):
        await asyncio.wait_for(holder.has_it.wait(), SECONDS)
        assert [task.has_it.is_set() for task in holders] == [index <= number for index in range(3)]
        await holder.wait_ended()


async def test_one_that_takes_long_lets_the_next_in() -> None:
    turns = LoadLock(0.01)
    slow, next_holder = Holder(turns), Holder(turns)
    await asyncio.wait_for(next_holder.has_it.wait(), SECONDS)
    assert not slow.task.done()
    await slow.wait_ended()
    # Its end is no turn for anybody: that was given away already.
    await next_holder.wait_ended()


async def test_the_end_of_a_slow_one_does_not_end_the_turn_of_another() -> None:
    turns = LoadLock(0.01)
    slow, other = Holder(turns), Holder(turns)
    await asyncio.wait_for(other.has_it.wait(), SECONDS)
    turns.timeout = LONG
    await slow.wait_ended()
    last = Holder(turns)
    third = Holder(turns)
    await asyncio.wait_for(last.has_it.wait(), SECONDS)
    await slow.wait_ended()
    assert not third.has_it.is_set()
    await other.wait_ended()
    assert not third.has_it.is_set()
    await last.wait_ended()
    await asyncio.wait_for(third.has_it.wait(), SECONDS)
    await third.wait_ended()


async def test_who_leaves_gives_it_back() -> None:
    turns = LoadLock(LONG)
    holder, waiting, last = Holder(turns), Holder(turns), Holder(turns)
    await asyncio.wait_for(holder.has_it.wait(), SECONDS)
    waiting.task.cancel()
    await until(waiting.task.done)
    holder.task.cancel()
    await asyncio.wait_for(last.has_it.wait(), SECONDS)
    assert not waiting.has_it.is_set()
    await last.wait_ended()
