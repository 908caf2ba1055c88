"""The instances of a servable: as many threads as its work needs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence

from triglot.executors.inbox import LoopInbox
from triglot.executors.instance import Instance
from triglot.executors.schedule import Schedule
from triglot.executors.work import Execution, Explain, Function, Hook, Inputs, InstanceExecution, Work


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
