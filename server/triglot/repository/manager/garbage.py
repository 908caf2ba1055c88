"""Collects reference cycles after an unload: modules refer to each other, and may hold weights."""

from __future__ import annotations

import asyncio
import gc
import time

from triglot.repository.manager.thread import in_thread

MAX_TIME_SHARE = 0.01
"""Limit on the share of time spent in collections, as no other Python code runs meanwhile."""

MAX_ROUNDS = 3
"""Limit on collections in a row: what one frees may have kept a cycle alive that the next one finds."""


class GarbageCollector:
    """Runs garbage collections on a thread, on request and rate-limited. Used on the event loop."""

    def __init__(self) -> None:
        self._requested = False
        self._earliest_start = 0.0
        self._frozen = False
        self._collecting: asyncio.Task[None] | None = None

    def freeze(self) -> None:
        """Excludes all current objects from automatic collections; those after an unload include them."""
        gc.collect()
        gc.freeze()
        self._frozen = True

    def collect_soon(self) -> None:
        """Request a collection of the current garbage, as soon as the rate limit permits."""
        self._requested = True
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        while self._requested:
            await asyncio.sleep(max(0.0, self._earliest_start - time.monotonic()))
            self._requested = False
            began = time.monotonic()
            await in_thread(self._free)
            finished_at = time.monotonic()
            self._earliest_start = finished_at + (finished_at - began) / MAX_TIME_SHARE

    def _free(self) -> None:
        if self._frozen:
            gc.unfreeze()  # The unloaded objects are among the frozen ones.
        for _ in range(MAX_ROUNDS):
            if not gc.collect():
                break
        if self._frozen:
            gc.freeze()

    def close(self) -> None:
        """Cancel pending collections."""
        if self._collecting is not None:
            self._collecting.cancel()
