"""Runs calls that are not coroutines in transports whose handlers are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from triglot.core.roles import RunningCall


async def wait_ended(start: Callable[[Callable[[Any], object]], RunningCall | None]) -> None:
    """Start a call with a callback for its end, and wait for it. If this is cancelled, so is the call."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(_: object) -> None:
        if not future.done():
            future.set_result(None)

    call = start(end)
    try:
        await future
    except asyncio.CancelledError:
        if call is not None:
            await cancel(call)
        raise


async def cancel(call: RunningCall) -> None:
    """Cancel a call, and wait for its end: user code on the event loop may take a while."""
    call.cancel()
    while not call.done():
        await _end_of(call)


async def _end_of(call: RunningCall) -> None:
    over = asyncio.Event()
    call.add_done_callback(lambda _: over.set())
    try:
        await over.wait()
    except asyncio.CancelledError:
        call.cancel()  # Again: user code may have swallowed the first cancellation.
