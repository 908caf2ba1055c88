"""The loop stays awake between calls that come soon after each other, and at no other time."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
from repeated_scenes import Held, array, kserve, served

from served_models import SECONDS
from triglot.transports.h2 import busy_poll
from triglot.transports.h2.busy_poll import BusyPoll
from waiting import until

INFER = "/inference.GRPCInferenceService/ModelInfer"
LONG = 60.0


class Yields:
    """How often the loop looked for others that want its core: once in each turn that it is kept awake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(os, "sched_yield", self)

    def __call__(self) -> None:
        self.count += 1

    async def in_turns(self, turns: int = 10) -> int:
        """In so many turns of the loop."""
        before = self.count
        for _ in range(turns):
            await asyncio.sleep(0)
        return self.count - before


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> Yields:
    return Yields(monkeypatch)


async def test_what_came_soon_is_waited_for(yields: Yields) -> None:
    poll = BusyPoll(asyncio.get_running_loop(), LONG)
    poll.heard()
    poll.rest()
    assert await yields.in_turns() == 0, "the first one came after nothing"
    poll.heard()
    assert await yields.in_turns() == 0, "something is to be done"
    poll.rest()
    assert await yields.in_turns(10) == 10
    for _ in range(3):  # Within a turn.
        poll.heard()
        poll.rest()
    assert await yields.in_turns(10) == 10
    poll.heard()
    await yields.in_turns(1)
    assert await yields.in_turns() == 0


async def test_what_takes_long_is_not(yields: Yields, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(busy_poll, "time", SimpleNamespace(monotonic=lambda: now))
    poll = BusyPoll(asyncio.get_running_loop(), 1.0)
    poll.rest()
    now = 1.5
    poll.heard()
    poll.rest()
    assert await yields.in_turns() == 0, "the last one came too late"
    now = 2.0
    poll.heard()
    poll.rest()
    now = 2.5
    assert await yields.in_turns(10) == 10
    now = 3.5
    await yields.in_turns(1)
    assert await yields.in_turns() == 0, "this one does"


@pytest.mark.parametrize("seconds", [0.0, LONG])
async def test_calls(yields: Yields, seconds: float) -> None:
    model = Held()
    async with served("h2", {"held": model}, busy_poll=seconds) as client:
        infer = client.channel.unary_unary(INFER)
        for _ in range(3):
            await infer(kserve("held", array(0)), timeout=SECONDS)
        assert (await yields.in_turns() > 0) == (seconds > 0)
        model.begun.clear()
        model.gate.clear()
        call = infer(kserve("held", array(0)), timeout=SECONDS)
        await until(model.begun.is_set)
        await yields.in_turns(1)
        assert await yields.in_turns() == 0, "a call runs"
        model.gate.set()
        await call
        assert (await yields.in_turns() > 0) == (seconds > 0)
