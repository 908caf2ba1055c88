"""Runs codec work on threads when it would take too long on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

OFF_LOOP_BYTES = 128 * 1024
"""Text larger than this takes longer to process than the switch to a thread and back."""


class OneAtATime:
    """Runs work on threads, one piece at a time, in order of arrival. On the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns.

        The next piece waits until this one has ended, even if the caller is cancelled.
        """
        await self._turn.acquire()
        # Not in a local variable: an error's traceback would refer to it, a cycle for the garbage collector.
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        running = self._loop.run_in_executor(None, work)
        running.add_done_callback(self._ended)
        return running

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._turn.release()


async def run_sized(size: int, function: Callable[..., T], *arguments: object) -> T:
    """Returns what `function` returns; it runs on a thread if `size` is above `OFF_LOOP_BYTES`."""
    if size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)
