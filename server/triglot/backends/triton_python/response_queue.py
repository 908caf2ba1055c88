"""The response queue of one request to a decoupled model: threads put responses, the server's loop takes them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress

from triglot.core.errors import ServingError
from triglot.core.types import Answer

BUFFER = 32
"""Limit on responses that are queued for a slow client before the sending thread blocks."""
LOOP_BUFFER = 1024
"""As `BUFFER`, for code on a loop, where blocking would delay all other requests of the instance."""


class ResponseQueue:
    """An `Outlet` that queues responses. Created on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Answer | ServingError | None] = deque()
        # Reentrant: the garbage collector may end a `ResponseChannel`, which takes it, on any thread at any time.
        self._has_room = threading.Condition(threading.RLock())
        self._reader: asyncio.Future[None] | None = None
        self._woken_reader: asyncio.Future[None] | None = None
        self._abandoned = False

    def put(self, response: Answer | ServingError) -> None:
        """Queues a response, or an error as the last one. Blocks while the client is slow."""
        limit = LOOP_BUFFER if _on_event_loop() else BUFFER
        with self._has_room:
            if not isinstance(response, ServingError):
                while len(self._items) >= limit and not self._abandoned:
                    self._has_room.wait()
            self._append(response)

    def end(self) -> None:
        """Queues the end of the responses."""
        self._append(None)

    def _append(self, item: Answer | ServingError | None) -> None:
        if self._abandoned:
            return
        self._items.append(item)
        reader = self._reader
        if reader is not None and reader is not self._woken_reader:
            self._woken_reader = reader
            with suppress(RuntimeError):  # The loop is closed: the server has stopped.
                self._loop.call_soon_threadsafe(_wake, reader)

    async def take(self) -> Answer | None:
        """Returns the next response, None at the end, on the loop. Raises a queued `ServingError`."""
        while not self._items:
            reader = self._reader = self._loop.create_future()
            if self._items:
                break  # One arrived between the check and the wait.
            await reader
        item = self._items.popleft()
        if len(self._items) in (BUFFER // 2, LOOP_BUFFER // 2):
            with self._has_room:
                self._has_room.notify_all()
        if isinstance(item, ServingError):
            try:
                raise item
            finally:
                del item  # Its traceback refers to this frame.
        return item

    def abandon(self) -> None:
        """Stops taking responses, on the loop; unblocks the sending threads."""
        with self._has_room:
            self._abandoned = True
            self._items.clear()
            self._has_room.notify_all()


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
