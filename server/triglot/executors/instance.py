"""An instance: one thread that calls the model's blocking code."""

from __future__ import annotations

import logging
import threading
import time

from triglot.executors.inbox import LoopInbox
from triglot.executors.schedule import Schedule
from triglot.executors.work import Explain, Function, Work

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1
"""After a schedule has failed: it may fail again."""


class Instance:
    """Takes whatever waits, one piece of work after the other, and puts what is `finished` there for the loop.

    `number` is its own among the instances of its model, from 0.
    """

    def __init__(
        self,
        name: str,
        number: int,
        schedule: Schedule,
        function: Function,
        explain: Explain,
        finished: LoopInbox[Work],
    ) -> None:
        self._number = number
        self._schedule = schedule
        self._function = function
        self._explain = explain
        self._finished = finished
        # A daemon: a model that never returns must not keep a stopped server alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Block until the thread has ended; the schedule is closed."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._run_all()
            except BaseException:  # Without this thread all that waits would wait for ever.
                log.exception("%s: nothing could be taken from its schedule", self._thread.name)
                time.sleep(PAUSE_SECONDS)
            else:
                return

    def _run_all(self) -> None:
        """Until the schedule has no more."""
        while (work := self._schedule.take(self._number)) is not None:
            try:
                work.run(self._function, self._explain)
            except BaseException:  # Without this thread all that comes later would wait for ever.
                log.exception("%s: what must not raise has raised", self._thread.name)
            if work.delivers:
                self._finished.put(work)
            # The caller's arrays are not kept while this thread waits.
            del work
