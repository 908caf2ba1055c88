"""A `Duplex` over an iterator of requests, for rows that take their requests as a `Duplex`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from triglot.core.duplex import Duplex


class Iterated(Duplex):
    """Reads one request ahead. Responses are written one by one: `offer` sends none."""

    def __init__(self, requests: AsyncIterator[bytes]) -> None:
        self._requests = requests
        self._next: bytes | None = None
        self._error: Exception | None = None
        self._over = False
        self._reading: asyncio.Task[None] | None = None
        self._taken = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._over and self._next is None and self._error is None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._requests

    def listen(self, on_ready: Callable[[], None]) -> None:
        self._reading = asyncio.ensure_future(self._read(on_ready))

    async def _read(self, on_ready: Callable[[], None]) -> None:
        try:
            async for request in self._requests:
                self._next = request
                on_ready()
                while self._next is not None:
                    self._taken.clear()
                    await self._taken.wait()
        except Exception as error:
            self._error = error
        self._over = True
        on_ready()

    def take(self) -> bytes | None:
        request, self._next = self._next, None
        if request is not None:
            self._taken.set()
        elif self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
        return request

    def offer(self, answers: deque[bytes]) -> None:
        """See the base class."""

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
