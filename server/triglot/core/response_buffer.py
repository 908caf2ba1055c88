"""`ResponseBuffer`, which keeps the responses of one request until its reader takes them."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np

from triglot.core.call import Call
from triglot.core.errors import ServingError, UnreadResponses, own_copy

MAX_UNREAD_BYTES: Final = 64 * 2**20
"""Default of the option `max_unread_bytes`."""
STREAM_BUFFER: Final = 32
"""Responses that are buffered for a slow reader before a thread that no other work needs waits for it."""
RESPONSE_BYTES: Final = 512
"""Memory of a kept response besides its tensors' bytes."""
PATIENCE_SECONDS: Final = 0.5
"""How long a thread that others may need waits for room, for each `limit` of bytes that are read meanwhile."""
LOOK_SECONDS: Final = 0.05
"""How often a thread that waits for a reader looks whether others need it."""
NOTHING: Final = object()
"""Returned by `ResponseBuffer.take` if there is no response yet."""


class StreamEnd:
    """Last item of a stream, with the error that ended it, if any."""

    def __init__(self, error: ServingError | None) -> None:
        self.error = error


def _never() -> bool:
    return False


class ResponseBuffer:
    """The responses of one call: any thread puts them, and the event loop takes them.

    `notify` is called on the loop when there is something to `take` again, once until `take` finds nothing.

    Strategy: a thread that no other work needs waits for a slow reader. Any other does not while at most `limit`
    bytes are kept. Then it waits as long as the reader takes `limit` bytes within `PATIENCE_SECONDS`, so a burst
    of the model is no error. A response for which there is still no room ends the stream with `UnreadResponses`,
    and the call counts as cancelled: a client that does not read may not stop a thread that serves others.
    """

    __slots__ = (
        "_call",
        "_held",
        "_items",
        "_limit",
        "_lock",
        "_loop",
        "_notify",
        "_patience",
        "_room",
        "_waiting",
        "_woken",
        "closed",
        "exceeded",
    )

    def __init__(
        self, call: Call, limit: int, loop: asyncio.AbstractEventLoop, notify: Callable[[], object]
    ) -> None:
        self.closed = False
        """Whether no more responses are accepted."""
        self.exceeded: UnreadResponses | None = None
        """Error of a response that exceeded `limit`."""
        self._call = call
        self._limit = limit
        self._loop = loop
        self._notify = notify
        self._items: deque[tuple[Any, int]] = deque()
        self._held = 0
        self._patience = PATIENCE_SECONDS
        # Reentrant: the garbage collector may end a request, and with it this stream, on any thread at any time.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._waiting = 0
        self._woken = False

    def put(self, response: Any, waits: Callable[[], bool] = _never) -> bool:
        """Add a response; return False if it is no longer wanted. On any thread.

        `waits` returns whether no other work needs the thread. Then it blocks while `STREAM_BUFFER` responses are
        buffered, or `limit` bytes.
        """
        size = memory_of(response)
        with self._lock:
            if len(self._items) >= STREAM_BUFFER or self._exceeds(size):
                self._wait_for_room(size, waits)
            if self.closed or self._call.cancelled:
                return False
            if not self._exceeds(size):
                self._append(response, size)
                return True
            self.exceeded = UnreadResponses(
                f"the client has not read {self._held} bytes of the request's responses, "
                f"{size} more would exceed the {self._limit} that max_unread_bytes allows"
            )
            self._items.clear()
            self._call.mark_cancelled()
            self.end(own_copy(self.exceeded))
            self._on_loop(self._call.cancel)
        return False

    def _exceeds(self, size: int) -> bool:
        return self._held + size > self._limit and self._held > 0

    def _wait_for_room(self, size: int, waits: Callable[[], bool]) -> None:
        while not self.closed:
            exceeds = self._exceeds(size)
            full = exceeds or len(self._items) >= STREAM_BUFFER
            if not (exceeds and self._patience > 0) and not (full and waits()):
                break
            began = time.monotonic()
            self._waiting += 1
            self._room.wait(LOOK_SECONDS)
            self._waiting -= 1
            self._patience = max(0.0, self._patience - (time.monotonic() - began))

    def end(self, error: ServingError | None = None) -> None:
        """End the stream, unless it has ended, after the responses that are buffered. On any thread."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._append(StreamEnd(error), 0)
                self._room.notify_all()

    def _append(self, item: Any, size: int) -> None:
        self._items.append((item, size))
        self._held += size
        if not self._woken:  # Waking the loop costs more than a small model does.
            self._woken = True
            self._on_loop(self._notify)

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # The loop is closed: the server has stopped without waiting for this call.
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- on the event loop ---

    def take(self) -> Any:
        """Return the next response, a `StreamEnd`, or `NOTHING`."""
        with self._lock:
            if not self._items:
                self._woken = False
                return NOTHING
            item, size = self._items.popleft()
            self._held -= size
            if self._patience < PATIENCE_SECONDS:
                self._patience = min(PATIENCE_SECONDS, self._patience + PATIENCE_SECONDS * size / self._limit)
            if self._waiting and (len(self._items) <= STREAM_BUFFER // 2 or self._held <= self._limit // 2):
                self._room.notify_all()
        return item

    def abandon(self) -> None:
        """Accept no more responses, and drop those that are buffered: the reader has ended."""
        with self._lock:
            self.closed = True
            self._items.clear()
            self._room.notify_all()
            self._notify = _ignore  # Its owner and this buffer would keep each other alive.


def _ignore() -> None:
    """Do nothing: responses are no longer taken."""


def memory_of(response: object) -> int:
    """Estimate the bytes of memory that a response takes: a message, or outputs by name."""
    if not isinstance(response, dict):
        return RESPONSE_BYTES + _memory_of(response)
    size = RESPONSE_BYTES
    for output in response.values():
        size += _memory_of(output)
    return size


def _memory_of(output: Any) -> int:
    size = getattr(output, "nbytes", None)  # Arrays, tensors of other libraries, and memoryviews.
    if not isinstance(size, int):
        return sys.getsizeof(output)
    if isinstance(output, np.ndarray) and output.dtype.hasobject:
        size += sum(map(sys.getsizeof, output.ravel().tolist()))
    return size
