"""What a model's own code says of whether it is ready."""

from __future__ import annotations

import asyncio
import threading

import pytest

from triglot.scheduling.servable import Readiness


class Check:
    """Says that it is ready once it may; counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.go = threading.Event()

    def __call__(self) -> bool:
        self.calls += 1
        return self.go.wait(20)


async def test_who_asks_while_it_runs_waits_for_the_same_answer() -> None:
    check = Check()
    readiness = Readiness("m", check)
    asking = [asyncio.create_task(readiness.ask()) for _ in range(3)]
    await asyncio.sleep(0)  # All of them have begun.
    check.go.set()
    assert await asyncio.gather(*asking) == [True, True, True]
    assert check.calls == 1
    assert await readiness.ask()
    assert check.calls == 2


async def test_late_is_not_ready_and_who_asks_next_waits_for_what_still_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = Check()
    readiness = Readiness("m version 1", check, seconds=0.05)
    assert not await readiness.ask()
    assert "m version 1: the readiness check takes longer than 0.05 s" in caplog.text
    assert not await readiness.ask()
    readiness = Readiness("m version 1", check)
    asking = asyncio.create_task(readiness.ask())
    await asyncio.sleep(0)
    check.go.set()
    assert await asking
    assert check.calls == 2


async def test_cancelled_waiter_leaves_the_answer_to_others() -> None:
    check = Check()
    readiness = Readiness("m", check)
    leaving, staying = (asyncio.create_task(readiness.ask()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    check.go.set()
    assert await staying
    assert check.calls == 1


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
async def test_what_it_raises_means_no(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise error

    assert not await Readiness("m", fail).ask()
    assert "m: the readiness check failed" in caplog.text
