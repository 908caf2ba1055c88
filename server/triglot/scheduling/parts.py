"""Splits a request with more rows than one execution may have, and joins the results (tfs 6.5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from triglot.core.errors import Internal, own_copy
from triglot.executors.joining import append
from triglot.executors.work import Inputs, Work

log = logging.getLogger(__name__)


class Part(Work):
    """Some rows of a request."""

    __slots__ = ("_unsplit",)

    def __init__(self, unsplit: UnsplitRequest, inputs: Inputs, execution: Work) -> None:
        super().__init__(inputs, execution.call, execution.sink, execution.receiver)
        self._unsplit = unsplit

    def start(self, batch_size: int) -> None:
        """Note the start. On an instance's thread."""
        self._unsplit.started(batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """Note the end.

        On an instance's thread; joining and splitting count as the request's time in the model.
        """
        self._unsplit.on_end()

    def settle(self) -> None:
        """Report to the `UnsplitRequest`."""
        self._unsplit.delivered(self)


class UnsplitRequest:
    """The parts of `execution`, of `size` rows each, which run in any order and on any instances.

    The parts end on threads, where the last one joins their outputs; the first failed part fails the request.
    `deliver` is called once, on the event loop, when all parts are delivered or one has failed.
    """

    def __init__(self, execution: Work, rows: int, size: int, deliver: Callable[[UnsplitRequest], object]) -> None:
        self.execution = execution
        self.parts: Sequence[Part] = [
            Part(self, {name: array[at : at + size] for name, array in execution.inputs.items()}, execution)
            for at in range(0, rows, size)
        ]
        self.pieces = [(part, min(size, rows - at * size)) for at, part in enumerate(self.parts)]
        self._deliver = deliver
        self._lock = threading.Lock()
        self._has_started = False
        self._unended = self._undelivered = len(self.parts)

    def started(self, batch_size: int) -> None:
        """Note that a part starts; the first one starts the request."""
        with self._lock:
            if not self._has_started:
                self._has_started = True
                self.execution.start(batch_size)

    def on_end(self) -> None:
        """Note that a part has ended, with a result or an error; the last one joins the results."""
        with self._lock:
            self._unended -= 1
            last = not self._unended
        if last and all(part.failure is None for part in self.parts):
            try:
                self.execution.result = append([part.result for part in self.parts])
            except Internal as error:
                log.error("%s", error.message)
                self.execution.failure = own_copy(error)
            except Exception:
                log.exception("cannot join the outputs for the parts of a request")
                self.execution.failure = Internal("cannot join the outputs for the parts of the request")

    def delivered(self, part: Part) -> None:
        """Note that a part's outcome has reached the event loop. On the event loop."""
        if not self._undelivered:
            return
        self._undelivered -= 1
        if part.failure is not None:
            self.execution.failure = part.failure
            self._undelivered = 0
        if not self._undelivered:
            self.execution.end()
            self._deliver(self)
