"""The instances of a model as threads, which take work from a schedule, and the way back to the event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from triglot.executors.parking import Doorbell
from triglot.executors.schedule import Schedule
from triglot.executors.work import Execution, Explain, Function, Hook, Inputs, InstanceExecution, Work

T = TypeVar("T")

log = logging.getLogger(__name__)


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


class Instances:
    """At most `count` threads, which take what `start`'s schedule has. On the event loop, but for `join`."""

    def __init__(
        self, name: str, count: int, function: Function, explain: Explain, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._name = name
        self._count = count
        self._function = function
        self._explain = explain
        self._loop = loop
        self._schedule: Schedule | None = None
        self._finished: LoopInbox[Work] | None = None
        self._threads: list[Instance] = []

    def __len__(self) -> int:
        """The threads that were started, and not joined."""
        return len(self._threads)

    def start(self, schedule: Schedule) -> None:
        """Start the first one; a thread that never runs is dear, too, so the others come when there is work."""
        self._schedule = schedule
        self._finished = LoopInbox(self._loop, _deliver)
        self.add(1)

    def add(self, wanted: int) -> None:
        """Start so many more, if there may be so many."""
        assert self._schedule is not None
        assert self._finished is not None
        for number in range(len(self._threads), min(len(self._threads) + wanted, self._count)):
            name = f"{self._name}#{number}"
            self._threads.append(
                Instance(name, number, self._schedule, self._function, self._explain, self._finished)
            )

    @property
    def alive(self) -> bool:
        """Whether one of them runs."""
        return any(instance.alive for instance in self._threads)

    async def run_on_every(self, inputs: Inputs, hook: Hook, explain: Explain) -> None:
        """Have `hook` call the model once on each thread, on all of them at the same time.

        All are started for it; the schedule's limit does not hold. Raises the first error, as `explain` says it;
        then, and when this is cancelled, what still runs sees that its call is cancelled.
        """
        assert self._schedule is not None
        self.add(self._count)
        together = threading.Barrier(len(self._threads))
        executions = [
            InstanceExecution(inputs, self._loop.create_future(), together, hook, explain) for _ in self._threads
        ]
        try:
            _put_beyond_limit(self._schedule, executions)
            await asyncio.gather(*[execution.future for execution in executions])
        finally:
            for execution in executions:
                execution.call.cancel()
                self._schedule.discard(execution)
            together.abort()

    def join(self) -> None:
        """Block until all have ended; the schedule is closed."""
        for instance in self._threads:
            instance.join()
        # They refer to the model, and would keep it until the garbage collector comes by.
        self._threads.clear()
        if self._finished is not None:
            self._finished.close()


def _deliver(work: Work) -> None:
    work.deliver()


def _put_beyond_limit(schedule: Schedule, executions: Sequence[Execution]) -> None:
    # Nobody else puts before this returns.
    limit, schedule.limit = schedule.limit, sys.maxsize
    try:
        for execution in executions:
            schedule.put(execution)
    finally:
        schedule.limit = limit
