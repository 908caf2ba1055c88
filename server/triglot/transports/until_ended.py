"""Calls that run without a coroutine, for transports whose handlers are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from triglot.core.running import Running


async def ended(start: Callable[[Callable[[Any], object]], Running | None]) -> None:
    """Start a call, which is given what to call at its end, and wait for that. Cancelled, it cancels the call."""
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


async def cancel(call: Running) -> None:
    """Cancel it, and wait for its end: code of users on the loop may take a while."""
    call.cancel()
    while not call.done():
        await _end_of(call)


async def _end_of(call: Running) -> None:
    over = asyncio.Event()
    call.add_done_callback(lambda _: over.set())
    try:
        await over.wait()
    except asyncio.CancelledError:
        call.cancel()  # Again, since code of users may have swallowed the first one.
