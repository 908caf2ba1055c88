"""Calls that repeat others, as a row and its transport see them: they need no coroutine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Code


class Reply(Protocol):
    """Where the answer to such a call goes: one of the methods is called, once. `observed` counts it."""

    @property
    def defer(self) -> Callable[[Callable[[], None]], object]:
        """Does a thing when all that came together with the request has begun."""

    def respond(self, message: bytes, /) -> None:
        """It is this, and counted."""

    def conclude(self, answer: Awaitable[Any], observed: Any, /) -> None:
        """It is what `answer` gives, to be encoded, or the error that it raises, and to be counted."""

    def given_up(self) -> Code:
        """Nobody waits for it any more. How the call is counted."""


class Repeated(Protocol):
    """Such a call, once it has begun."""

    over: bool
    """Whether its reply has been told."""

    def cancel(self) -> object:
        """Nobody waits for the answer any more: end it now."""

    def cancelling(self) -> int:
        """How often it was cancelled and has not ended yet."""


class Pattern(Protocol):
    """What such calls have in common."""

    def begin(self, data: bytes, call: Call, observed: Any, reply: Reply, /) -> Repeated:
        """Run the one of this request."""


FindPattern = Callable[[bytes], Pattern | None]
"""The one that a request is of; None: it is to be run in the ordinary way."""
