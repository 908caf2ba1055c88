"""Where the answers of a streaming call go that a model sends by itself."""

from __future__ import annotations

from typing import Any, Protocol


class Outlet(Protocol):
    """Of one call; any thread may use it."""

    def respond(self, answer: Any) -> bool:
        """Send one answer; blocks while the reader is slow. False when nobody reads any more."""

    def finish(self) -> None:
        """No more answers come."""


class _Closed:
    def respond(self, _: Any) -> bool:
        return False

    def finish(self) -> None:
        pass


CLOSED: Outlet = _Closed()
"""Of a call that takes no such answers, or no more."""
