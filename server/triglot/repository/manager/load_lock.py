"""A lock with a limited holding time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class LoadLock:
    """A lock that is released automatically when its holder takes longer than `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Callable[[], None]]:
        """Hold the lock in the block, for at most `timeout` seconds; yield a function that releases it early."""
        await self._lock.acquire()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._lock.release()

        timer = asyncio.get_running_loop().call_later(self.timeout, release)
        try:
            yield release
        finally:
            timer.cancel()
            release()
