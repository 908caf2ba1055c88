"""Interface to send responses of a streaming call that a model pushes with `Call.respond`."""

from __future__ import annotations

from typing import Any, Protocol


class Outlet(Protocol):
    """Sink for the responses of one call; may be used on any thread."""

    def respond(self, answer: Any) -> bool:
        """Send one response; returns False once the stream is closed. See `Call.respond`."""

    def finish(self) -> None:
        """End the stream: no more responses follow."""


class _Closed:
    def respond(self, _: Any) -> bool:
        return False

    def finish(self) -> None:
        pass


CLOSED: Outlet = _Closed()
"""Outlet of a call that takes no pushed responses, or no longer takes them."""
