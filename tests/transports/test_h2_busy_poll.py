"""The loop stays awake between calls that come soon after each other, and at no other time."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.served_models import SECONDS
from tests.transports.layout_calls import Held, array, kserve, served
from triglot.transports.http2.protocol import BusyPoll

INFER = "/inference.GRPCInferenceService/ModelInfer"


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


class Clock:
    """The time is what the test says it is."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_what_came_soon_is_waited_for(yields: Yields, clock: Clock) -> None:
    poll = BusyPoll(asyncio.get_running_loop(), 0.5, clock)
    poll.call_begun()
    poll.idle()
    assert await yields.in_turns() == 0, "the first one came after nothing"
    poll.call_begun()
    assert await yields.in_turns() == 0, "a call is open"
    poll.idle()
    assert await yields.in_turns(10) == 10
    for _ in range(3):  # Within a turn.
        poll.call_begun()
        poll.idle()
    assert await yields.in_turns(10) == 10
    poll.call_begun()
    await yields.in_turns(1)
    assert await yields.in_turns() == 0


async def test_what_takes_long_is_not(yields: Yields, clock: Clock) -> None:
    poll = BusyPoll(asyncio.get_running_loop(), 0.5, clock)
    poll.call_begun()
    poll.idle()
    clock.now += 1.0
    poll.call_begun()
    poll.idle()
    assert await yields.in_turns() == 0, "the last one came too late"
    clock.now += 0.25
    poll.call_begun()
    poll.idle()
    clock.now += 0.25
    assert await yields.in_turns(10) == 10
    poll.idle()  # Something else than a call has been answered.
    clock.now += 0.5
    await yields.in_turns(1)
    assert await yields.in_turns() == 0, "this one does"


async def test_what_is_no_call_is_not_waited_for(yields: Yields, clock: Clock) -> None:
    poll = BusyPoll(asyncio.get_running_loop(), 0.5, clock)
    poll.call_begun()
    for _ in range(3):
        poll.idle()
    assert await yields.in_turns() == 0
    clock.now += 1.0
    poll.idle()
    poll.call_begun()
    poll.idle()
    assert await yields.in_turns() == 0, "since the last answer it took long"


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_calls(yields: Yields, seconds: float) -> None:
    model = Held()
    async with served("h2", {"held": model}, busy_poll=seconds) as client:
        infer = client.channel.unary_unary(INFER)
        for _ in range(3):
            await infer(kserve("held", array(0)), timeout=SECONDS)
        assert (await yields.in_turns() > 0) == (seconds > 0)
        model.forget_arrivals("infer")
        model.close_point("infer")
        try:
            call = infer(kserve("held", array(0)), timeout=SECONDS)
            await model.until_at("infer")
            await yields.in_turns(1)
            assert await yields.in_turns() == 0, "a call runs"
        finally:
            model.open_point("infer")
        await call
        assert (await yields.in_turns() > 0) == (seconds > 0)
