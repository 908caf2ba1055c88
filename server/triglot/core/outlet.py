"""Interface to send responses of a streaming call that a model pushes with `Call.respond`."""

from __future__ import annotations

from typing import Any, Protocol

MAX_UNREAD_BYTES = 64 * 2**20
"""Default of the option `max_unread_bytes`: bytes of responses that are kept for a client that does not read."""


class Outlet(Protocol):
    """Sink for the responses of one call; may be used on any thread."""

    def respond(self, answer: Any) -> bool:
        """Send one response; blocks while the reader is slow. Returns False once the stream is closed."""

    def finish(self) -> None:
        """End the stream: no more responses follow."""


class _Closed:
    def respond(self, _: Any) -> bool:
        return False

    def finish(self) -> None:
        pass


CLOSED: Outlet = _Closed()
"""Outlet of a call that takes no pushed responses, or no longer takes them."""
