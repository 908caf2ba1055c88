"""grpc.aio: calls that arrive close together wait for each other, and single ones do not wait."""

from __future__ import annotations

import asyncio

import pytest

from triglot.transports.aio import gathering
from triglot.transports.aio.gathering import MAX_CALLS, MAX_SKIPPED, MIN_CALLS, PROBE_INTERVAL, Gathering

pytestmark = pytest.mark.both_transports

CALLS = 8


@pytest.fixture(name="patient")
def _patient(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    """One whose calls wait until there are enough."""
    monkeypatch.setattr(gathering, "WAIT_SECONDS", 60)
    return Gathering()


def joined(calls: Gathering, count: int) -> list[asyncio.Future[None]]:
    turns = [calls.join() for _ in range(count)]
    assert None not in turns
    return [turn for turn in turns if turn is not None]


async def burst(calls: Gathering, count: int) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*joined(calls, count))


async def test_a_burst_ends_after_a_moment_and_the_next_ones_with_as_many_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Gathering()
    await burst(calls, CALLS)
    monkeypatch.setattr(gathering, "WAIT_SECONDS", 60)
    for _ in range(PROBE_INTERVAL - 1):
        first = joined(calls, CALLS - 1)
        assert not any(turn.done() for turn in first)
        (last,) = joined(calls, 1)
        assert all(turn.done() for turn in (*first, last))
    # Now and then more are let in.
    assert not any(turn.done() for turn in joined(calls, CALLS))


async def test_no_burst_is_larger_than_the_limit(patient: Gathering) -> None:
    assert all(turn.done() for turn in joined(patient, MAX_CALLS))
    assert not any(turn.done() for turn in joined(patient, 1))


async def test_calls_that_come_singly_soon_wait_no_more() -> None:
    calls = Gathering()
    waited = 0
    for _ in range(3 * MAX_SKIPPED):
        if (turn := calls.join()) is not None:
            waited += 1
            await turn
    assert waited < 15
    # The next ones that come together find each other again.
    while calls.join() is None:
        pass
    await burst(calls, MIN_CALLS - 1)
    assert calls.join() is not None


async def test_cancelled_call_delays_no_other() -> None:
    calls = Gathering()
    first, *others = joined(calls, MIN_CALLS)
    first.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*others)
