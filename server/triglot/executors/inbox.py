"""From the threads of instances to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from triglot.executors.doorbell import Doorbell

T = TypeVar("T")

log = logging.getLogger(__name__)


class LoopInbox(Generic[T]):
    """What threads put, `receive` gets on the loop; what one of them puts, in order.

    The loop is woken once for everything that is put until it runs: a small model finishes a whole burst before
    the loop gets its turn, and a wake-up for each result would cost more than the model does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[T], object]) -> None:
        self._loop = loop
        self._receive = receive
        self._items: deque[T] = deque()
        self._woken = False
        self._bell = Doorbell()
        loop.add_reader(self._bell.file, self._answer)

    def put(self, item: T) -> None:
        """On a thread."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            self._bell.ring()

    def _answer(self) -> None:
        self._bell.wait()
        # In this order: an item that is put from here on rings again, and what rang before is not read away then.
        self._woken = False
        self._hand_over()

    def _hand_over(self) -> None:
        while self._items:
            try:
                while self._items:
                    self._receive(self._items.popleft())
            except Exception:  # The others would lie here until one more comes.
                log.exception("a result could not be handed over")

    def close(self) -> None:
        """Nobody puts any more. On any thread."""
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            self._bell.close()  # The loop is closed: it watches nothing.

    def _close(self) -> None:
        self._loop.remove_reader(self._bell.file)
        self._bell.close()
        self._hand_over()  # What has rung may not have been answered.
