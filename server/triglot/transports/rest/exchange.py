"""One request over HTTP and the way out for its answer, whatever carries it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from email.utils import formatdate

from triglot.core.errors import InvalidArgument
from triglot.core.scattered import Scattered
from triglot.transports.rest.fields import Fields

JOINED_BYTES = 64 * 1024
"""Of several parts of a body, which are handed on as one."""
READ_AHEAD = 512 * 1024
"""Of a body, beyond which its client has to wait until some of it is read."""


class Clock:
    """What the Date field says, made once a second."""

    __slots__ = ("_date", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._date = ""

    def date(self) -> str:
        """Of this second."""
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True)
        return self._date


class RequestBody(ABC):
    """A request's body as it comes. `length`: of the body, if that is known."""

    __slots__ = ()
    length: int | None

    @abstractmethod
    def whole(self) -> bytes | None:
        """The whole body where it has come already; None where there is more to come, or it is broken."""

    @abstractmethod
    async def read(self) -> bytes:
        """What has come since the last time, at least one byte; b"" after the end.

        Raises `InvalidArgument` for a body that is broken.
        """


class Exchange(ABC):
    """A request, and what its answer is handed to.

    `fields` are the request's header fields, names in lower case; `headers` has the last value of each. `is_old`:
    the client speaks HTTP/1.0. `begun`: the head of an answer is on its way.
    """

    __slots__ = ("begun", "body", "fields", "headers", "is_old", "target", "verb")

    def __init__(self, verb: str, target: str, fields: Fields, body: RequestBody, *, is_old: bool = False) -> None:
        self.verb = verb
        self.target = target
        self.fields = fields
        self.headers: Mapping[str, str] = dict(fields)
        self.body = body
        self.is_old = is_old
        self.begun = False

    @property
    @abstractmethod
    def remote(self) -> str:
        """The client's address, if it has one."""

    @abstractmethod
    def certificate_names(self) -> Sequence[str]:
        """Those of the client's certificate; none without one."""

    @abstractmethod
    def respond(self, status: int, fields: Fields, body: bytes | Scattered) -> None:
        """Send an answer that has been made as a whole."""

    @abstractmethod
    async def begin(self, status: int, fields: Fields) -> None:
        """Send the head of an answer whose body is written in pieces."""

    @abstractmethod
    async def write(self, chunk: bytes) -> None:
        """Send a piece; waits while the client does not read. Raises `ConnectionError` when it has left."""

    @abstractmethod
    async def finish(self) -> None:
        """The answer that was begun is complete."""

    @abstractmethod
    def abort(self) -> None:
        """There is no end of the answer that was begun."""

    def values(self, name: str) -> list[str]:
        """All values of a header field, in their order."""
        return [value for one, value in self.fields if one == name]


class IncomingBody(RequestBody):
    """A body that a transport adds to as it comes, and that is read once. On the loop.

    Subclasses take `want`: whether more of it may be received.
    """

    __slots__ = ("_error", "_parts", "_size", "_waiter", "ended", "length", "paused")

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.ended = False
        """Whether nothing more comes."""
        self.paused = False
        """Whether too much of it waits for somebody to read it."""
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def want(self, *, more: bool) -> None:
        """Hold the client up, or have it go on."""

    def feed(self, data: bytes) -> None:
        """The next part."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > READ_AHEAD and not self.paused:
            self.paused = True
            self.want(more=False)
        self._wake()

    def end(self) -> None:
        """All has come."""
        self.ended = True
        self._wake()

    def fail(self, problem: str) -> None:
        """It is broken, or cut off."""
        if not self.ended and self._error is None:
            self._error = problem
            self._wake()

    def whole(self) -> bytes | None:
        """See the base class."""
        return self._take(self._size) if self.ended else None

    async def read(self) -> bytes:
        """See the base class."""
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
        """All that waits, if it has no more bytes than that, or the first part of it."""
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
