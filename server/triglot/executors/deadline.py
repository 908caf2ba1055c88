"""Deadlines and cancellation of code on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Generic, TypeVar

from triglot.core.call import Call
from triglot.core.errors import DeadlineExceeded, ServingError

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

BEFORE_START = "before the request was started"
WHILE_WAITING = "while the request waited in the queue"
WHILE_RUNNING = "while the model ran"
WHILE_STREAMING = "while the model was streaming"


def is_cancelled(error: BaseException) -> bool:
    """Returns whether `error` is the cancellation of the current task, and not raised by its code itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def seen_late(error: E, call: Call, when: str) -> E | DeadlineExceeded:
    """Returns `DeadlineExceeded` for a `ServingError` raised after the call's deadline, else the error itself.

    The model, or a model that it called, may notice the deadline before the server's timer does.
    """
    if call.expired and isinstance(error, ServingError) and not isinstance(error, DeadlineExceeded):
        return call.overdue(when)
    return error


async def in_time(call: Call, work: Awaitable[T], when: str) -> T:
    """Returns the result of `work`, which is cancelled at the call's deadline.

    Raises `DeadlineExceeded`; `when` completes its text.
    """
    if call.deadline is None:
        return await work
    try:
        async with asyncio.timeout(call.remaining) as scope:
            answer = await work
    except TimeoutError:
        if not scope.expired():
            raise  # The work's own error.
        raise call.overdue(when) from None
    if scope.expired():  # The work ran on in spite of its cancellation.
        raise call.overdue(when)
    return answer


class EachInTime(Generic[T]):
    """Iterates over the responses that arrive before the call's deadline. Raises `DeadlineExceeded`."""

    # Not a generator: one that is not closed explicitly is closed only when the garbage collector runs.

    def __init__(self, call: Call, answers: AsyncGenerator[T, None]) -> None:
        self._call = call
        self._answers = answers

    def __aiter__(self) -> EachInTime[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        if self._call.expired:  # The reader may have been slow, and code that never suspends cannot be cancelled.
            raise self._call.overdue(WHILE_STREAMING)
        return in_time(self._call, anext(self._answers), WHILE_STREAMING)
