"""`LoopExecutor`, which runs models with `async def infer` on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from triglot.core.errors import queue_full
from triglot.core.running import Defer
from triglot.executors.work import Explain, Function


class LoopWork(Protocol):
    """Work that runs on the event loop, in a task of its own."""

    task: asyncio.Task[None] | None
    """The task that runs it, from its start until it is delivered."""

    async def run_on_loop(self, function: Function, explain: Explain) -> None:
        """Run the model, and keep its result or error. Raise only the cancellation of its task."""

    def deliver(self) -> None:
        """Report the outcome. Called once it has ended or was cancelled, possibly before its first step."""


class LoopExecutor:
    """An `Executor` of `LoopWork`, which starts at once: there is no queue. On the event loop.

    `orphaned` returns the number of calls that still run in the model's processes after their callers have
    stopped waiting; they count towards the limit of `check_room`.
    """

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
        """Number of running calls."""
        self._loop = loop
        self.function = function
        """The model's `infer`; may be replaced before it takes calls."""
        self._explain = explain
        self._orphaned = orphaned

    def __len__(self) -> int:
        return 0

    @property
    def busy(self) -> int:
        """See `Executor`. Without a schedule that respects `capacity`, more calls may run than this returns."""
        return min(self.running, self.capacity)

    @property
    def alive(self) -> bool:
        """See `Executor`."""
        return True

    def open(self) -> None:
        """See `Executor`."""

    def check_room(self, limit: int) -> None:
        """See `Executor`. There is no queue; the limit applies to running calls."""
        if self.running + self._orphaned() >= limit:
            raise queue_full(f"{limit} requests are running")

    def start(self, work: LoopWork, _: Defer | None = None) -> None:
        """See `Executor`."""
        self.running += 1
        task = work.task = self._loop.create_task(self._run(work))
        task.add_done_callback(partial(self._ended, work))

    async def _run(self, work: LoopWork) -> None:
        await work.run_on_loop(self.function, self._explain)
        self._deliver(work, work.task)

    def _ended(self, work: LoopWork, task: asyncio.Task[None]) -> None:
        if work.task is task:  # Not delivered yet: it was cancelled, possibly before its first step.
            self._deliver(work, task)

    def _deliver(self, work: LoopWork, task: asyncio.Task[None] | None) -> None:
        self.running -= 1
        try:
            work.deliver()
        finally:
            if work.task is task:
                work.task = None  # It may keep the cancellation's error, whose frames refer to the work.

    def discard(self, work: LoopWork) -> bool:
        """See `Executor`. All work has started already: this cancels its task."""
        if work.task is not None:
            work.task.cancel()
        return False

    async def add(self, count: int, _: Callable[[Function], object]) -> Sequence[BaseException]:
        """See `Executor`. Does not call `begin`: there are no threads to prepare."""
        self.capacity += count
        return ()

    async def remove(self, count: int) -> None:
        """See `Executor`."""
        self.capacity -= count

    def close(self) -> None:
        """See `Executor`."""

    def join(self) -> None:
        """See `Executor`. Return at once; the servable's leases show when the last call has ended."""
