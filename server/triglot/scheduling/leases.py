"""The calls that hold a loaded version: it is closed when the last of them has let go of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Self


class Leases:
    """A `with` block is a lease. Belongs to the loop, but for `wait_idle`."""

    def __init__(self) -> None:
        self._leases = 0
        self._drained: asyncio.Event | None = None
        self._idle = threading.Event()

    @property
    def leases(self) -> int:
        """Calls that hold this version at the moment."""
        return self._leases

    def __enter__(self) -> Self:
        """Take a lease: one more call holds this version."""
        self._leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._leases -= 1
        if self._drained is not None:
            self._tell_idle()

    def _tell_idle(self) -> None:
        if self._drained is not None and not self._leases:
            self._drained.set()
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no call holds this version; nobody takes a lease any more."""
        self._drained = asyncio.Event()
        if self._leases:
            await self._drained.wait()

    def end_leases(self, *, at_once: bool) -> None:
        """Nobody takes a lease any more. `at_once`: who has one is not waited for."""
        self._drained = self._drained or asyncio.Event()
        if at_once or not self._leases:
            self._idle.set()

    def wait_idle(self) -> None:
        """On another thread, after `end_leases`: block until the last lease is over."""
        self._idle.wait()
