"""From an instance's thread to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class LoopInbox(Generic[T]):
    """What one thread puts, `receive` gets on the loop, in order.

    The loop is woken once for everything that is put until it runs: a small model finishes a whole burst before
    the loop gets its turn, and a wake-up for each result would cost more than the model does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[T], object]) -> None:
        self._loop = loop
        self._receive = receive
        self._items: deque[T] = deque()
        self._woken = False

    def put(self, item: T) -> None:
        """On the thread."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                pass  # The loop is closed: the server has stopped without waiting for this call.

    def _drain(self) -> None:
        # Cleared first: an item that is put from here on wakes the loop again.
        self._woken = False
        while self._items:
            try:
                while self._items:
                    self._receive(self._items.popleft())
            except Exception:  # The others would lie here until one more comes.
                log.exception("a result could not be handed over")
