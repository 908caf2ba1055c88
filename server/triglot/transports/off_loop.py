"""Codec work that is too long for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

OFF_LOOP_BYTES = 128 * 1024
"""Text larger than this takes longer than the way to a thread and back."""


class OneAtATime:
    """Runs work on threads, one piece after the other, in the order that it came in. On the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives. The next piece waits for its end, even if nobody waits for it any more."""
        await self._turn.acquire()
        # In no variable: an error would have its own frame, and both be left to the garbage collector.
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        running = self._loop.run_in_executor(None, work)
        running.add_done_callback(self._ended)
        return running

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._turn.release()


async def run_sized(size: int, function: Callable[..., T], *arguments: object) -> T:
    """What `function` gives, on a thread when it has more than `OFF_LOOP_BYTES` to work through."""
    if size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)
