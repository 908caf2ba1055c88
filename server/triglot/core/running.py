"""Interfaces of calls that run without a coroutine: started once, ended by a callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from triglot.core.errors import ServingError

Defer = Callable[[Callable[[], None]], object]
"""Runs a function soon, on the event loop, as `call_soon` does."""


class Cancellable(Protocol):
    """A running operation. On the event loop."""

    def cancel(self) -> object:
        """Cancel it: its result is no longer needed. It ends as soon as its code allows."""


class Running(Cancellable, Protocol):
    """A running call, with the methods of `asyncio.Task` that its owner needs."""

    def cancelling(self) -> int:
        """Returns the number of pending cancellations, as `asyncio.Task.cancelling` does."""

    def done(self) -> bool:
        """Whether it has ended."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call `callback` with this object once it has ended; it has not ended yet."""


class Outcome(Protocol):
    """The outcome of a request: an `answer`, an `error`, or `cancelled`."""

    answer: Any
    error: ServingError | None
    cancelled: bool


class OnLoop(Cancellable, Protocol):
    """A running operation that may have code running on the event loop."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that runs its code on the loop, if any."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""


async def cancel(running: OnLoop) -> None:
    """Cancel it, and wait until its code on the loop has ended."""
    running.cancel()
    while not running.over and (task := running.task) is not None:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
            break
        running.cancel()  # Again, since user code may have suppressed the first cancellation.


Done = Callable[[Any], None]
"""Receives the `Outcome` of a request, on the loop, once; maybe before the call that starts it returns."""


def raise_error(outcome: Outcome) -> None:
    """Raises and remove the outcome's error, if there is one: the error's frames may refer to the outcome."""
    if outcome.error is None:
        return
    error, outcome.error = outcome.error, None
    try:
        raise error
    finally:
        del error
