"""The interface of a transport for one HTTP request and its response."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from email.utils import formatdate

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Scattered
from triglot.transports.rest.fields import Fields

JOINED_BYTES = 64 * 1024
"""Parts of a body up to this total size are joined when it is read."""
READ_AHEAD = 512 * 1024
"""Bytes of a body that are received before it is read; beyond that, the client has to wait."""


class Clock:
    """Formats the Date header field, once per second."""

    __slots__ = ("_date", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._date = ""

    def date(self) -> str:
        """Returns the current time as an HTTP date."""
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True)
        return self._date


class RequestBody(ABC):
    """A request's body, which may still be arriving. `length`: its length in bytes, if known."""

    __slots__ = ()
    length: int | None

    @abstractmethod
    def whole(self) -> bytes | None:
        """Returns the body if all of it has arrived; None if not, or if it is invalid."""

    @abstractmethod
    async def read(self) -> bytes:
        """Returns what has arrived since the last call, at least one byte; b"" at the end.

        Raises `InvalidArgument` for an invalid body.
        """


class Exchange(ABC):
    """A request, and the way to send its response.

    `fields` are the request's header fields, names in lower case; `headers` has the last value of each.
    `is_http10`: the client speaks HTTP/1.0. `begun`: the response's head has been sent.
    """

    __slots__ = ("begun", "body", "fields", "headers", "is_http10", "target", "verb")

    def __init__(
        self, verb: str, target: str, fields: Fields, body: RequestBody, *, is_http10: bool = False
    ) -> None:
        self.verb = verb
        self.target = target
        self.fields = fields
        self.headers: Mapping[str, str] = dict(fields)
        self.body = body
        self.is_http10 = is_http10
        self.begun = False

    @property
    @abstractmethod
    def remote(self) -> str:
        """The client's address; "" where it has none."""

    @abstractmethod
    def certificate_names(self) -> Sequence[str]:
        """Returns the names in the client's certificate; none without one."""

    @abstractmethod
    def respond(self, status: int, fields: Fields, body: bytes | Scattered) -> None:
        """Send a complete response."""

    @abstractmethod
    async def begin(self, status: int, fields: Fields) -> None:
        """Send the head of a response whose body follows in chunks."""

    @abstractmethod
    async def write(self, chunk: bytes) -> None:
        """Send a chunk.

        Waits while the client does not read. Raises `ConnectionError` when it has disconnected.
        """

    @abstractmethod
    async def finish(self) -> None:
        """End a response that was begun."""

    @abstractmethod
    def abort(self) -> None:
        """Break off a response that was begun: the client sees that it is incomplete."""

    def values(self, name: str) -> list[str]:
        """Returns all values of a header field, in order."""
        return [value for one, value in self.fields if one == name]


class IncomingBody(RequestBody):
    """A body that a transport feeds as it arrives, and that is read once. On the event loop.

    Subclasses implement `want`.
    """

    __slots__ = ("_error", "_parts", "_size", "_waiter", "ended", "length", "paused")

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.ended = False
        """Whether the body is complete."""
        self.paused = False
        """Whether too much of it is waiting to be read."""
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def want(self, *, more: bool) -> None:
        """Called when the transport has to stop, or may continue, receiving the body."""

    def feed(self, data: bytes) -> None:
        """Add the next part."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > READ_AHEAD and not self.paused:
            self.paused = True
            self.want(more=False)
        self._wake()

    def end(self) -> None:
        """Note that the body is complete."""
        self.ended = True
        self._wake()

    def fail(self, problem: str) -> None:
        """Note that the body is invalid, or incomplete."""
        if not self.ended and self._error is None:
            self._error = problem
            self._wake()

    def whole(self) -> bytes | None:
        return self._take(self._size) if self.ended else None

    async def read(self) -> bytes:
        while not self._parts and not self.ended:
            if self._error is not None:
                raise InvalidArgument(f"the request body is invalid: {self._error}")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take(JOINED_BYTES)

    def _take(self, joined: int) -> bytes:
        """Returns all waiting parts if they have at most `joined` bytes, else the first one."""
        parts = self._parts
        if len(parts) > 1 and self._size <= joined:
            taken = b"".join(parts)
            parts.clear()
        else:
            taken = parts.popleft() if parts else b""
        self._size -= len(taken)
        if self.paused and self._size <= READ_AHEAD:
            self.paused = False
            self.want(more=True)
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
