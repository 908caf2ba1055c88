"""The calls that the running code works for: what it logs has their ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

from triglot.core.call import Call

CURRENT_CALLS: ContextVar[Sequence[Call]] = ContextVar("triglot_current_calls", default=())
"""Those that are executed now; none outside of a model's code."""


class RunningFor(list[Call]):
    """Within the block this thread or task, and what it starts with its context, works for these calls.

    It is emptied at the end: a task that the code has left running works for no call any more, and keeps none.
    Code that runs in steps of a generator enters and leaves with each, and ends once.
    """

    __slots__ = ("_token",)

    _token: Token[Sequence[Call]]

    def __enter__(self) -> None:
        self._token = CURRENT_CALLS.set(self)

    def __exit__(self, *_: object) -> None:
        self.end()

    def enter(self) -> None:
        """The code runs."""
        self._token = CURRENT_CALLS.set(self)

    def leave(self) -> None:
        """It does not, until it is entered again or ended."""
        try:
            CURRENT_CALLS.reset(self._token)
        except (RuntimeError, ValueError):
            pass  # It was left before, or the garbage collector closes a coroutine whose context is gone.

    def end(self) -> None:
        """It has ended."""
        self.clear()
        self.leave()
