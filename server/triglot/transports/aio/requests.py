"""The requests of a stream over grpc.aio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from triglot.core.running import Requests

MAX_REQUESTS = 32
MAX_BYTES = 64 * 1024
"""Limits of what is read ahead; one request may exceed them."""


def _no_listener() -> None:
    pass


class AioRequests(Requests):
    """Reads requests ahead, from `listen` until `close`.

    `read` returns the next request, or `end` after the last one.
    """

    def __init__(self, read: Callable[[], Awaitable[Any]], end: object) -> None:
        self._read = read
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._over = False
        self._notify: Callable[[], None] = _no_listener
        self._reading: asyncio.Task[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._over and not self._queue and self._error is None

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when a request has arrived, or the end."""
        self._notify = on_ready
        self._reading = self._loop.create_task(self._read_all())

    async def _read_all(self) -> None:
        read, end, queue = self._read, self._end, self._queue
        try:
            while (request := await read()) is not end:
                queue.append(request)
                self._bytes += len(request)
                self._notify()
                while self._bytes > MAX_BYTES or len(queue) >= MAX_REQUESTS:
                    self._taken = self._loop.create_future()
                    await self._taken
        except Exception as error:
            self._error = error
        self._over = True
        self._notify()

    def take(self) -> bytes | None:
        if self._queue:
            request = self._queue.popleft()
            self._bytes -= len(request)
            if self._taken is not None and not self._taken.done():
                self._taken.set_result(None)
            return request
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
        return None

    async def close(self) -> None:
        """Read no more."""
        self._notify = _no_listener  # The listener refers to this object.
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
