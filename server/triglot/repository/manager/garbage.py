"""Frees what unloaded code holds in cycles: its modules refer to each other, and to weights, perhaps."""

from __future__ import annotations

import asyncio
import gc
import time

from triglot.repository.manager.thread import in_thread

SHARE = 0.01
"""Of the time, at most: nothing else in Python runs meanwhile."""

ROUNDS = 3
"""What one round frees may have held a cycle that the next one finds."""


class Garbage:
    """Collects garbage on a thread, when it is asked to and not too often."""

    def __init__(self) -> None:
        self._asked = False
        self._next = 0.0
        self._settled = False
        self._collecting: asyncio.Task[None] | None = None

    def settle(self) -> None:
        """What is there by now is there to stay: later collections do not go through it, but for those after an
        unload."""
        gc.collect()
        gc.freeze()
        self._settled = True

    def collect_soon(self) -> None:
        """What is garbage by now is freed, as soon as that is not too often."""
        self._asked = True
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        while self._asked:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self._asked = False
            began = time.monotonic()
            await in_thread(self._free)
            ended = time.monotonic()
            self._next = ended + (ended - began) / SHARE

    def _free(self) -> None:
        if self._settled:
            gc.unfreeze()  # What was unloaded is among it.
        for _ in range(ROUNDS):
            if not gc.collect():
                break
        if self._settled:
            gc.freeze()

    def close(self) -> None:
        """Collect no more."""
        if self._collecting is not None:
            self._collecting.cancel()
