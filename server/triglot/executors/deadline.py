"""Deadlines and cancellation of code on the event loop."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from triglot.core.call import Call
from triglot.core.errors import DeadlineExceeded, ServingError

E = TypeVar("E", bound=BaseException)

BEFORE_START = "before the request was started"
WHILE_WAITING = "while the request waited in the queue"
WHILE_RUNNING = "while the model ran"
WHILE_STREAMING = "while the model was streaming"


def is_cancelled(error: BaseException) -> bool:
    """Return whether `error` is the cancellation of the current task, and not raised by its code itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def is_cancellation(error: BaseException) -> bool:
    """Return whether the error means that the caller cancelled, and not that the model failed."""
    return isinstance(error, GeneratorExit) or is_cancelled(error)


def seen_late(error: E, call: Call, when: str) -> E | DeadlineExceeded:
    """Return `DeadlineExceeded` for a `ServingError` raised after the call's deadline, else the error itself.

    The model, or a model that it called, may notice the deadline before the server's timer does.
    """
    if call.expired and isinstance(error, ServingError) and not isinstance(error, DeadlineExceeded):
        return call.overdue(when)
    return error
