"""All that was received together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Burst:
    """A `with` block is one: what it defers is done at its end, once, rather than in a turn of the loop's own."""

    __slots__ = ("_deferred", "_loop", "on")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._deferred: list[Callable[[], None]] = []
        self.on = False
        """Whether it goes on."""

    def defer(self, work: Callable[[], None]) -> None:
        """Do it when all that was received has been acted on; where that is so, soon."""
        if not self.on:
            self._loop.call_soon(work)
        elif work not in self._deferred:
            self._deferred.append(work)

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        try:
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self.on = False
