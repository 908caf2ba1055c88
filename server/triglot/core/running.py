"""What runs a call without a coroutine: begun once, ended by a callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from triglot.core.errors import ServingError

Defer = Callable[[Callable[[], None]], object]
"""Runs a function a little later on the loop: its `call_soon`."""


class Cancellable(Protocol):
    """Something that was started. On the loop."""

    def cancel(self) -> object:
        """Nobody waits for it any more: end it as soon as its code lets it."""


class Running(Cancellable, Protocol):
    """What runs a call, as tasks do."""

    def cancelling(self) -> int:
        """How often it was cancelled and has not ended yet."""

    def done(self) -> bool:
        """Whether it has ended."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call it with this when it has ended; it has not."""


class Outcome(Protocol):
    """How a request ended: with an `answer`, with an `error`, or `cancelled`."""

    answer: Any
    error: ServingError | None
    cancelled: bool


class OnLoop(Cancellable, Protocol):
    """Something that was started, and may run code on the loop."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What runs code on the loop."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""


async def cancel(running: OnLoop) -> None:
    """Cancel it, and wait for its code on the loop."""
    running.cancel()
    while not running.over and (task := running.task) is not None:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
            break
        running.cancel()  # Again, since code of users may have swallowed the first one.


Done = Callable[[Any], None]
"""Takes the `Outcome` of a request, on the loop, once; maybe before what started it returns."""


def raise_error(outcome: Outcome) -> None:
    """Raise its error, if it has one, which it then has no more: the error's frames may hold the outcome."""
    if outcome.error is None:
        return
    error, outcome.error = outcome.error, None
    try:
        raise error
    finally:
        del error
