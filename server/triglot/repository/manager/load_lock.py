"""One at a time, as long as it does not take for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class LoadLock:
    """A lock that lets the next one in when its holder takes longer than `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Callable[[], None]]:
        """Within the block it is this one's turn, for `timeout` seconds at least, or until it passes that on."""
        await self._lock.acquire()
        mine = True

        def pass_on() -> None:
            nonlocal mine
            if mine:
                mine = False
                self._lock.release()

        passing = asyncio.get_running_loop().call_later(self.timeout, pass_on)
        try:
            yield pass_on
        finally:
            passing.cancel()
            pass_on()
