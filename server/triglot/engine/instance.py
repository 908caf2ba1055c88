"""An instance: one thread that calls the model's blocking code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from triglot.core.types import Call
from triglot.engine.queue import WorkQueue
from triglot.engine.work import Execution, Explain, Inputs, Stream

HAND_BACK_AFTER_SECONDS = 0.0005
"""How long a finished result may wait for the rest of its burst."""
SLOWNESS_FORGOTTEN = 0.99
"""What is left of a slow execution's weight after each further one."""


def _hand_back(finished: list[Execution]) -> None:
    for execution in finished:
        execution.deliver()


class Instance:
    """Takes whatever waits, one piece of work at a time, and hands a burst's results back with one wake-up.

    One `call_soon_threadsafe` for each result would cost more than a small model does. A result must not wait
    for a slow neighbour, though: while any recent execution was slow, each is handed back at once.
    """

    def __init__(
        self,
        name: str,
        queue: WorkQueue[Execution | Stream],
        function: Callable[[Inputs, Call], Any],
        explain: Explain,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._queue = queue
        self._function = function
        self._explain = explain
        self._loop = loop
        self._slowest = 0.0
        # A daemon: a model that never returns must not keep a stopped server alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.take()) is not None:
            self._run_burst(work)

    def _run_burst(self, work: Execution | Stream | None) -> None:
        finished: list[Execution] = []
        started = time.monotonic()
        hand_back_at = started + HAND_BACK_AFTER_SECONDS
        while work is not None:
            if isinstance(work, Execution):
                work.run(self._function, self._explain)
                finished.append(work)
                now = time.monotonic()
                self._slowest = max(now - started, self._slowest * SLOWNESS_FORGOTTEN)
                started = now
                if now >= hand_back_at or self._slowest > HAND_BACK_AFTER_SECONDS:
                    self._give(finished)
                    finished = []
                    hand_back_at = now + HAND_BACK_AFTER_SECONDS
            else:
                if finished:
                    self._give(finished)
                    finished = []
                work.run(self._function, self._explain)
                started = time.monotonic()
            work = self._queue.take_nowait()
        if finished:
            self._give(finished)

    def _give(self, finished: list[Execution]) -> None:
        try:
            self._loop.call_soon_threadsafe(_hand_back, finished)
        except RuntimeError:
            pass  # The loop is closed: the server has stopped without waiting for this call.
