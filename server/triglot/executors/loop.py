"""The event loop as an executor, for `async def` code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from triglot.core.errors import queue_full
from triglot.core.running import Defer
from triglot.executors.work import Explain, Function


class LoopWork(Protocol):
    """What runs on the loop in one task, which it has as `task` until it is delivered."""

    task: asyncio.Task[None] | None

    async def run_on_loop(self, function: Function, explain: Explain) -> None:
        """Keep the result or the error. Raises nothing but that it was cancelled."""

    def deliver(self) -> None:
        """It has ended, or was cancelled, maybe before it began."""


class LoopExecutor:
    """An `Executor` of `LoopWork`, which never waits. `orphaned`: calls that go on elsewhere without a caller."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Function,
        explain: Explain,
        capacity: int,
        orphaned: Callable[[], int] = int,
    ) -> None:
        self.capacity = capacity
        self.running = 0
        """Calls of code on the loop that run."""
        self._loop = loop
        self._function = function
        self._explain = explain
        self._orphaned = orphaned

    def __len__(self) -> int:
        return 0

    @property
    def busy(self) -> int:
        """See `Executor`. Where requests do not wait for one another, more may run than this says."""
        return min(self.running, self.capacity)

    @property
    def alive(self) -> bool:
        """See `Executor`."""
        return True

    def open(self) -> None:
        """See `Executor`."""

    def check_room(self, limit: int) -> None:
        """See `Executor`. Nothing waits; the bound is on how many run."""
        if self.running + self._orphaned() >= limit:
            raise queue_full(f"{limit} requests are running")

    def start(self, work: LoopWork, _: Defer | None = None) -> None:
        """See `Executor`."""
        self.running += 1
        task = work.task = self._loop.create_task(self._run(work))
        task.add_done_callback(partial(self._ended, work))

    async def _run(self, work: LoopWork) -> None:
        await work.run_on_loop(self._function, self._explain)
        self._deliver(work, work.task)

    def _ended(self, work: LoopWork, task: asyncio.Task[None]) -> None:
        if work.task is task:  # It was cancelled, maybe before it began.
            self._deliver(work, task)

    def _deliver(self, work: LoopWork, task: asyncio.Task[None] | None) -> None:
        self.running -= 1
        try:
            work.deliver()
        finally:
            if work.task is task:
                work.task = None  # It may have the error of its cancellation, whose frames have the work.

    def discard(self, work: LoopWork) -> bool:
        """See `Executor`: it has begun, and is cancelled."""
        if work.task is not None:
            work.task.cancel()
        return False

    async def add(self, count: int, _: Callable[[Function], object]) -> Sequence[BaseException]:
        """See `Executor`. Code on the loop has no instances that could begin."""
        self.capacity += count
        return ()

    async def remove(self, count: int) -> None:
        """See `Executor`."""
        self.capacity -= count

    def close(self) -> None:
        """See `Executor`."""

    def join(self) -> None:
        """See `Executor`; leases say when the last call has ended."""
