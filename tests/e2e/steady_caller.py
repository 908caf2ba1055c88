"""A client that calls again and again while something else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tests.process import SECONDS
from tests.waiting import wait_until

PAUSE = 0.005
"""Seconds between two calls, which take less than that."""


class Caller:
    """Calls `ask` again and again, on a thread of its own, from before the `with` block begins until it ends.

    The block begins after the first result. `answers` has the results in order, without consecutive duplicates. An
    error of `ask` is raised at the end of the block.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.answers: list[Any] = []
        self._ask = ask
        self._ends = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while True:
                answer = self._ask()
                if self.answers[-1:] != [answer]:
                    self.answers.append(answer)
                if self._ends.wait(PAUSE):
                    return
        except Exception as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._error is not None or bool(self.answers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(SECONDS)
        if self._error is not None:
            raise self._error

    def wait_for(self, answer: object) -> None:
        """Wait until the latest result is `answer`, or `ask` has failed: the block's end then raises the error.

        Raise `AssertionError` when it takes too long.
        """
        wait_until(lambda: self._error is not None or self.answers[-1:] == [answer])
