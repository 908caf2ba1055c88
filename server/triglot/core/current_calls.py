"""Context variable with the calls that the running code serves: its log records carry their ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

from triglot.core.call import Call

CURRENT_CALLS: ContextVar[Sequence[Call]] = ContextVar("triglot_current_calls", default=())
"""The calls that are executed now; empty outside of a model's code."""


class RunningFor(list[Call]):
    """Context manager: within it this thread or task, and what inherits its context, serves these calls.

    It is emptied at the end: a task that the code leaves running then serves no call, and keeps none alive.
    """

    __slots__ = ("_token",)

    _token: Token[Sequence[Call]]

    def __enter__(self) -> None:
        self._token = CURRENT_CALLS.set(self)

    def __exit__(self, *_: object) -> None:
        self.clear()
        try:
            CURRENT_CALLS.reset(self._token)
        except (RuntimeError, ValueError):
            pass  # The garbage collector closes a coroutine whose context is gone.
