"""How code on the loop ends before its time: at its call's deadline, or cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Generic, TypeVar

from triglot.core.call import Call
from triglot.core.errors import Cancelled, DeadlineExceeded

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

BEFORE_START = "before the request was started"
WHILE_WAITING = "while the request waited in the queue"
WHILE_RUNNING = "while the model ran"
WHILE_STREAMING = "while the model was streaming"


def is_cancelled(error: BaseException) -> bool:
    """Whether `error` is the cancellation of this very task."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def seen_late(error: E, call: Call, when: str) -> E | DeadlineExceeded:
    """The error itself; of code that gives up since it sees the deadline before we do, `DeadlineExceeded`."""
    return call.overdue(when) if isinstance(error, Cancelled) and call.expired else error


async def in_time(call: Call, work: Awaitable[T], when: str) -> T:
    """What `work` gives; at the call's deadline it is cancelled. Raises `DeadlineExceeded`, which says `when`."""
    if call.deadline is None:
        return await work
    try:
        async with asyncio.timeout(call.remaining) as scope:
            answer = await work
    except TimeoutError:
        if not scope.expired():
            raise  # Its own.
        raise call.overdue(when) from None
    if scope.expired():  # It went on in spite of its cancellation.
        raise call.overdue(when)
    return answer


class EachInTime(Generic[T]):
    """The answers that come before the call's deadline. Raises `DeadlineExceeded`."""

    # No generator: one that nobody closes is closed by the garbage collector, some time.

    def __init__(self, call: Call, answers: AsyncGenerator[T, None]) -> None:
        self._call = call
        self._answers = answers

    def __aiter__(self) -> EachInTime[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        if self._call.expired:  # Its reader may have been slow, and what never waits is never cancelled.
            raise self._call.overdue(WHILE_STREAMING)
        return in_time(self._call, anext(self._answers), WHILE_STREAMING)
