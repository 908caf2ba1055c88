"""The schedule of models without batching: requests are executed one by one."""

from __future__ import annotations

from collections.abc import Iterator

from triglot.core.errors import Unavailable
from triglot.core.running import Defer
from triglot.core.statistics import Reading
from triglot.executors.executor import Executor
from triglot.executors.work import Work


class Queue:
    """A `Schedule`: first in, first out. Requests are held in the executor's own queue, `limit` of them at most.

    `defer` runs a function later on the event loop: all requests of one turn of the loop are started together.
    """

    def __init__(self, limit: int, executor: Executor, defer: Defer) -> None:
        self._limit = limit
        self._executor = executor
        self._defer = defer
        self._closed = False

    def __len__(self) -> int:
        return len(self._executor)

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """See `Schedule`. Raises `QueueFull`, and `Unavailable` once closed."""
        if self._closed:
            raise Unavailable("the model was unloaded")
        self._executor.check_room(self._limit)
        self._executor.start(work, defer or self._defer)

    def discard(self, work: Work) -> bool:
        """See `Schedule`."""
        return self._executor.discard(work)

    def resized(self) -> None:
        """See `Schedule`. Nothing to do: instances take requests themselves."""

    def close(self) -> None:
        """See `Schedule`."""
        self._closed = True
        self._executor.close()

    def readings(self) -> Iterator[Reading]:
        """No metrics of its own: queued requests are counted for every schedule."""
        return iter(())
