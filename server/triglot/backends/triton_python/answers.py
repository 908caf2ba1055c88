"""The responses to one request of a decoupled model: threads put them, the server's loop takes them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress

from triglot.core.errors import ServingError
from triglot.core.types import Answer

BUFFER = 32
"""Responses that may wait for a slow client before the thread that sends is held up."""
LOOP_BUFFER = 1024
"""As `BUFFER`, of code on a loop: who holds that up holds up all other requests of the instance."""


class Answers:
    """An `Outlet`, and what it has been given. Made on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Answer | ServingError | None] = deque()
        # Also taken by a line that the garbage collector ends, wherever it comes by.
        self._room = threading.Condition(threading.RLock())
        self._reader: asyncio.Future[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        self._gone = False

    def put(self, answer: Answer | ServingError) -> None:
        """One answer; the last one where it is an error. Blocks while the client is slow."""
        most = LOOP_BUFFER if _on_a_loop() else BUFFER
        with self._room:
            if not isinstance(answer, ServingError):
                while len(self._items) >= most and not self._gone:
                    self._room.wait()
            self._append(answer)

    def end(self) -> None:
        """There are no more."""
        self._append(None)

    def _append(self, item: Answer | ServingError | None) -> None:
        if self._gone:
            return
        self._items.append(item)
        reader = self._reader
        if reader is not None and reader is not self._woken:
            self._woken = reader
            with suppress(RuntimeError):  # The loop has ended: the server has stopped.
                self._loop.call_soon_threadsafe(_wake, reader)

    async def take(self) -> Answer | None:
        """On the loop: the next answer, None at the end. Raises the `ServingError` that came in place of one."""
        while not self._items:
            reader = self._reader = self._loop.create_future()
            if self._items:
                break  # It came between the look and the waiting.
            await reader
        item = self._items.popleft()
        if len(self._items) in (BUFFER // 2, LOOP_BUFFER // 2):
            with self._room:
                self._room.notify_all()
        if isinstance(item, ServingError):
            try:
                raise item
            finally:
                del item  # Its traceback has this frame.
        return item

    def abandon(self) -> None:
        """On the loop: nobody takes any more; let the threads go on to notice it."""
        with self._room:
            self._gone = True
            self._items.clear()
            self._room.notify_all()


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
