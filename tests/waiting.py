"""Polling, for conditions that have no event. Tests poll with these functions only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

SECONDS = 60
"""Deadline of every wait; only a failing test waits as long."""
Found = TypeVar("Found")


def ever_later(first: float) -> Iterator[float]:
    """Yield eight deadlines in seconds, each twice the one before, for tests of calls that expire while they run.

    On a busy machine a call may expire before it runs; the test leaves the loop when it did not. Raises
    `AssertionError` after the last deadline.
    """
    for attempt in range(8):
        yield first * 2**attempt
    raise AssertionError("it was late each time before it began")


async def until(
    true: Callable[[], object], what: str = "it is not true", detail: Callable[[], object] = str
) -> None:
    """Poll until a condition, which another thread, task or process brings about, is true.

    Raise `AssertionError` after `SECONDS`, with the text `what` and the details that `detail` returns.
    """
    try:
        async with asyncio.timeout(SECONDS):
            while not true():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"after {SECONDS} s {what}: {detail()}") from None


async def until_found(look: Callable[[], Awaitable[Found]], true: Callable[[Found], object]) -> Found:
    """Call `look` until the condition is true of its result, and return that.

    Raise `AssertionError` after `SECONDS`.
    """
    deadline = time.monotonic() + SECONDS
    while not true(found := await look()):
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {found}"
        await asyncio.sleep(0.005)
    return found


def wait_until(true: Callable[[], object]) -> None:
    """Poll until the condition is true, blocking the thread. Raise `AssertionError` after `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, f"not true within {SECONDS} s"
        time.sleep(0.005)
