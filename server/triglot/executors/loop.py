"""`LoopExecutor`, which runs models with `async def infer` on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from triglot.core.current_calls import CURRENT_CALLS
from triglot.core.errors import queue_full, without_frames
from triglot.core.running import Defer
from triglot.executors.work import BEFORE_START, WHILE_STREAMING, Explain, Function, Work, is_cancellation


class LoopBatch(Protocol):
    """Work of several requests that runs on the event loop, in a task of its own."""

    task: asyncio.Task[None] | None
    """The task that runs it, from its start until it is delivered."""

    async def run_on_loop(self, function: Function, explain: Explain) -> None:
        """Run the model, and keep its result or error. Raise only the cancellation of its task."""

    def deliver(self) -> None:
        """Report the outcome. Called once it has ended or was cancelled, possibly before its first step."""


LoopWork = Work | LoopBatch


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
        task.add_done_callback(partial(self._on_end, work))

    async def _run(self, work: LoopWork) -> None:
        if isinstance(work, Work):
            await _run_unbatched(work, self.function, self._explain)
        else:
            await work.run_on_loop(self.function, self._explain)
        self._deliver(work, work.task)

    def _on_end(self, work: LoopWork, task: asyncio.Task[None]) -> None:
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


async def _run_unbatched(work: Work, function: Function, explain: Explain) -> None:
    """Run the model for one request, in the current task. Raise the caller's cancellation."""
    call = work.call
    if call.expired:
        work.failure = call.overdue(BEFORE_START)
        return
    call.execution_started(perf_counter())
    current = [call]
    CURRENT_CALLS.set(current)  # In this task's context.
    try:
        if work.iterates:
            await _iterate(work, function(work.inputs, call))
        else:
            work.result = await function(work.inputs, call)
        if work.is_late:  # The model ran on in spite of its cancellation.
            raise call.overdue(work.running_text)
    except BaseException as error:
        if work.is_late and isinstance(error, asyncio.CancelledError):
            work.failure = call.overdue(work.running_text)
        elif is_cancellation(error):
            call.cancel()
            raise
        else:
            # `CancelledError` or `SystemExit` raised by the model itself is a failure like any other. The
            # traceback refers to the work, which keeps the error: hence without frames.
            work.failure = without_frames(explain(error))
    finally:
        current.clear()
        work.seconds = call.execution_ended()


async def _iterate(work: Work, answers: AsyncGenerator[Any, None]) -> None:
    times = work.times
    assert times is not None  # Of every decoupled model.
    times.asked()
    async with aclosing(answers):
        async for answer in answers:
            times.computed()
            # The reader may have been slow, and code that never suspends cannot be cancelled.
            if work.is_late:
                raise work.call.overdue(WHILE_STREAMING)
            if not work.receiver.respond(work, answer):
                work.room = asyncio.get_running_loop().create_future()
                await work.room
            if work.call.expired:
                raise work.call.overdue(WHILE_STREAMING)
            times.asked()
