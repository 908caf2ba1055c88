"""Coroutines that wait for instances: for new and removed ones, and for a function that runs on each of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from triglot.executors.executor import Executor
from triglot.executors.work import Explain, Hook, Inputs, InstanceRun


async def errors_of(
    began: Sequence[asyncio.Future[BaseException | None]], executor: Executor
) -> list[BaseException]:
    """Return the errors of new threads that could not begin; all others count in the executor's `capacity`."""
    errors: list[BaseException] = []
    try:
        errors += [error for error in await asyncio.gather(*began) if error is not None]
    finally:
        executor.capacity += len(began) - len(errors)
    return errors


async def when_all_left(leaving: Sequence[asyncio.Future[None]], forget: Callable[[], None]) -> None:
    """Wait until the threads have left, then `forget` those that have ended."""
    await asyncio.gather(*leaving)
    forget()


async def run_on_every(
    executors: Sequence[Executor], inputs: Inputs, hook: Hook, explain: Explain, loop: asyncio.AbstractEventLoop
) -> None:
    """Run `hook` with the model once on each thread of the executors, on all threads at the same time.

    Raise the first error, as mapped by `explain`. After an error, and when this coroutine is cancelled, the calls
    that still run are marked as cancelled.
    """
    together = threading.Barrier(sum(executor.capacity for executor in executors))
    started: list[tuple[Executor, InstanceRun, asyncio.Future[Any]]] = []
    try:
        for executor in executors:
            for _ in range(executor.capacity):
                future = loop.create_future()
                run = InstanceRun(inputs, future, together, hook, explain)
                started.append((executor, run, future))
                executor.start(run)
        await asyncio.gather(*[future for _, _, future in started])
    finally:
        for executor, run, _ in started:
            run.call.cancel()
            executor.discard(run)
        together.abort()
