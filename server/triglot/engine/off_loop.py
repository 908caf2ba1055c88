"""Work of the server's own that would hold up the event loop.

Strategy: threads and the loop wake each other as they do for models. An executor's two hops, one to a thread and
one back, take some 100 µs more where large tensors go by between them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from triglot.core.errors import ServingError, as_serving_error
from triglot.engine.instances import Instances
from triglot.engine.queue import WorkQueue
from triglot.engine.work import Explain, Function, Work

T = TypeVar("T")

MOST_THREADS = 4


class OffLoop:
    """Threads for such work, of which the first starts with the first of it. On the loop."""

    def __init__(self) -> None:
        self._threads: Instances | None = None
        self._queue: WorkQueue[Work] | None = None

    async def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. One that nobody awaits any more is not begun."""
        queue = self._queue or self._start()
        future = asyncio.get_running_loop().create_future()
        job = _Job(work, future)
        queue.put(job)
        try:
            result: T = await future
        except asyncio.CancelledError:
            queue.discard(job)
            raise
        return result

    def _start(self) -> WorkQueue[Work]:
        loop = asyncio.get_running_loop()
        threads = self._threads = Instances("off_loop", MOST_THREADS, _no_model, _no_explanation, loop)
        queue = self._queue = WorkQueue[Work](sys.maxsize, loop.call_soon, threads.add)
        threads.start(queue)
        return queue

    async def close(self) -> None:
        """Wait for what has begun. Nothing more is called."""
        if self._queue is not None and self._threads is not None:
            self._queue.close()
            await asyncio.to_thread(self._threads.join)
            self._queue = self._threads = None


def _no_model(_: object, __: object) -> None:
    """What instances call, and such work does not."""


def _no_explanation(error: BaseException) -> ServingError:
    return as_serving_error(error, "the server")


class _Job:
    """See `Work`."""

    __slots__ = ("_error", "_future", "_result", "_work")
    delivers = True

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self._work = work
        self._future = future
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, _: Function, __: Explain) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error

    def deliver(self) -> None:
        error, self._error = self._error, None  # It has the traceback, which has `run`, which has this.
        if self._future.done():
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)
