"""What runs a call without a coroutine: begun once, ended by a callback."""

from __future__ import annotations

from collections.abc import Callable
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
