"""One at a time, as long as it does not take for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock that lets the next one in when its holder takes longer than `patience` seconds."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Within the block it is this one's turn, for `patience` seconds at least."""
        await self._lock.acquire()
        mine = True

        def pass_on() -> None:
            nonlocal mine
            mine = False
            self._lock.release()

        passing = asyncio.get_running_loop().call_later(self.patience, pass_on)
        try:
            yield
        finally:
            passing.cancel()
            if mine:
                self._lock.release()
