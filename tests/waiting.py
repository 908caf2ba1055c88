"""Waiting for what nobody tells: here alone tests look again and again, and no longer than they have to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

SECONDS = 60
"""How long anything may take; only a test that fails waits so long."""
Found = TypeVar("Found")


def ever_later(first: float) -> Iterator[float]:
    """Deadlines, in seconds, each twice the one before: for a test of what is late once it has begun.

    A busy machine may be late before that; the test ends the loop when it was not. Raises `AssertionError` when
    eight were not enough.
    """
    for attempt in range(8):
        yield first * 2**attempt
    raise AssertionError("it was late each time before it began")


async def until(
    true: Callable[[], object], what: str = "it is not true", said: Callable[[], object] = str
) -> None:
    """Wait for what another thread, task or process is about to bring about.

    Raises `AssertionError` when it takes too long: with `what` is wrong, and what is `said` of it then.
    """
    try:
        async with asyncio.timeout(SECONDS):
            while not true():  # noqa: ASYNC110 - nobody sets an event of the test's
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"after {SECONDS} s {what}: {said()}") from None


async def until_found(look: Callable[[], Awaitable[Found]], true: Callable[[Found], object]) -> Found:
    """Look until it is true of what is found. Raises `AssertionError` when it takes too long."""
    deadline = time.monotonic() + SECONDS
    while not true(found := await look()):
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {found}"
        await asyncio.sleep(0.005)
    return found


def wait_until(true: Callable[[], object]) -> None:
    """Look until it is true, where no event loop runs. Raises `AssertionError` when it takes too long."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, f"not true within {SECONDS} s"
        time.sleep(0.005)
