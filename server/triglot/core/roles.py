"""Interfaces of one or two methods that objects of several folders have: what responds, expires, is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Outlet(Protocol):
    """Sink for the responses of one call; may be used on any thread."""

    def respond(self, answer: Any) -> bool:
        """Send one response; return False once the stream is closed. See `Call.respond`."""

    def finish(self) -> None:
        """End the stream: no more responses follow."""


class Expiring(Protocol):
    """An entry with a deadline; compared by identity."""

    def expire(self) -> object:
        """Handle the passed deadline."""


class Cancellable(Protocol):
    """Anything that can be cancelled. On the event loop."""

    def cancel(self) -> object:
        """Cancel it: its result is no longer needed. It ends as soon as its code allows."""


class RunningCall(Cancellable, Protocol):
    """A call of a transport, with the methods of `asyncio.Task` that its owner needs."""

    def cancelling(self) -> int:
        """Return the number of pending cancellations, as `asyncio.Task.cancelling` does."""

    def done(self) -> bool:
        """Whether it has ended."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call `callback` with this object once it has ended; it has not ended yet."""
