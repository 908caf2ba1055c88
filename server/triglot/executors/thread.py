"""The instances of a model as threads, and the way to them from the event loop and back.

Strategy: work is pulled. `deque` is atomic, so neither side takes a lock to put or take; a thread that finds the
queue empty parks on a bell of its own and is called after the next `start`. Work is either in the deque or taken,
never both, so `discard` can promise that discarded work is not started.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from triglot.core.errors import Unavailable
from triglot.core.running import Defer
from triglot.executors.executor import Executor, queue_full
from triglot.executors.parking import Doorbell, Parking
from triglot.executors.work import Explain, Function, Hook, Inputs, InstanceExecution, Work

T = TypeVar("T")

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1
"""After no work could be taken: that may happen again."""


class LoopInbox(Generic[T]):
    """What threads put, `receive` gets on the loop; what one of them puts, in order.

    The loop is woken once for everything that is put until it runs: a small model finishes a whole burst before
    the loop gets its turn, and a wake-up for each result would cost more than the model does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[T], object]) -> None:
        self._loop = loop
        self._receive = receive
        self._items: deque[T] = deque()
        self._woken = False
        self._bell = Doorbell()
        loop.add_reader(self._bell.file, self._answer)

    def put(self, item: T) -> None:
        """On a thread."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            self._bell.ring()

    def _answer(self) -> None:
        self._bell.wait()
        # In this order: an item that is put from here on rings again, and what rang before is not read away then.
        self._woken = False
        self._hand_over()

    def _hand_over(self) -> None:
        while self._items:
            try:
                while self._items:
                    self._receive(self._items.popleft())
            except Exception:  # The others would lie here until one more comes.
                log.exception("a result could not be handed over")

    def close(self) -> None:
        """Nobody puts any more. On any thread."""
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            self._bell.close()  # The loop is closed: it watches nothing.

    def _close(self) -> None:
        self._loop.remove_reader(self._bell.file)
        self._bell.close()
        self._hand_over()  # What has rung may not have been answered.


class ThreadExecutor:
    """An `Executor` of `Work`: threads of these names, each of which is started when there is work for it.

    What is started beyond that waits, in its order.
    """

    def __init__(
        self, names: Sequence[str], function: Function, explain: Explain, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.capacity = len(names)
        self._names = names
        self._function = function
        self._explain = explain
        self._waiting: deque[Work] = deque()
        self._parked = Parking()
        self._waking = False
        self._closed = False
        self._loop = loop
        self._finished: LoopInbox[Work] | None = None
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> int:
        """Threads that wait for work."""
        return len(self._parked)

    @property
    def alive(self) -> bool:
        """See `Executor`."""
        return any(thread.is_alive() for thread in self._threads)

    def open(self) -> None:
        """See `Executor`: start the first thread."""
        self._finished = LoopInbox(self._loop, _deliver)
        self._grow(1)

    def check_room(self, limit: int) -> None:
        """See `Executor`. The bound is on how many wait."""
        if len(self._waiting) >= limit:
            raise queue_full(f"{limit} requests wait")

    def _grow(self, wanted: int) -> None:
        """A thread that never runs is dear, too: so many more are started, if there may be so many."""
        there = len(self._threads)
        for name in self._names[there : there + wanted]:
            # A daemon: a model that never returns must not keep a stopped server alive.
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, work: Work, defer: Defer | None = None) -> None:
        """See `Executor`. With `defer`, threads are woken through it: what comes until then is taken in one go.

        Raises `Unavailable` once closed.
        """
        if self._closed:
            raise Unavailable("the model was unloaded")
        self._waiting.append(work)
        if defer is None:
            self._wake()
        elif not self._waking:
            self._waking = True
            defer(self._wake)

    def _wake(self) -> None:
        self._waking = False
        waiting, parked = len(self._waiting), len(self._parked)
        self._parked.call(min(waiting, parked))
        if waiting > parked and not self._closed:
            self._grow(waiting - parked)

    def discard(self, work: Work) -> bool:
        """See `Executor`."""
        try:
            self._waiting.remove(work)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """See `Executor`."""
        self._closed = True
        self._parked.call_all()

    def join(self) -> None:
        """See `Executor`."""
        for thread in self._threads:
            thread.join()
        # They refer to the model, and would keep it until the garbage collector comes by.
        self._threads.clear()
        if self._finished is not None:
            self._finished.close()

    # --- on the threads ---

    def _run(self) -> None:
        while True:
            try:
                self._run_all()
            except BaseException:  # Without this thread all that waits would wait for ever.
                log.exception("%s: no work could be taken", threading.current_thread().name)
                time.sleep(PAUSE_SECONDS)
            else:
                return

    def _run_all(self) -> None:
        """Whatever waits, one after the other, until this is closed and empty."""
        finished = self._finished
        assert finished is not None
        while (work := self._take()) is not None:
            try:
                work.run(self._function, self._explain)
            except BaseException:  # Without this thread all that comes later would wait for ever.
                log.exception("%s: what must not raise has raised", threading.current_thread().name)
            if work.delivers:
                finished.put(work)
            # The caller's arrays are not kept while this thread waits.
            del work

    def _take(self) -> Work | None:
        """The oldest work, waiting for it; None once this is closed and empty."""
        while True:
            closed = self._closed  # Nothing is started any more: there is what is there now.
            try:
                return self._waiting.popleft()
            except IndexError:
                if closed:
                    return None
            self._parked.wait(unless=self._has_news)

    def _has_news(self) -> bool:
        return bool(self._waiting) or self._closed


def _deliver(work: Work) -> None:
    work.deliver()


async def run_on_every(
    executors: Sequence[Executor], inputs: Inputs, hook: Hook, explain: Explain, loop: asyncio.AbstractEventLoop
) -> None:
    """Have `hook` call the model once on each thread of these, on all of them at the same time.

    Raises the first error, as `explain` says it; then, and when this is cancelled, what still runs sees that its
    call is cancelled.
    """
    together = threading.Barrier(sum(executor.capacity for executor in executors))
    started: list[tuple[Executor, InstanceExecution]] = []
    try:
        for executor in executors:
            for _ in range(executor.capacity):
                execution = InstanceExecution(inputs, loop.create_future(), together, hook, explain)
                started.append((executor, execution))
                executor.start(execution)
        await asyncio.gather(*[execution.future for _, execution in started])
    finally:
        for executor, execution in started:
            execution.call.cancel()
            executor.discard(execution)
        together.abort()
