"""Requests and replies between the supervisor and a worker, in both directions: length-prefixed JSON over a
socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

from triglot.core.errors import as_serving_error, error_fields, error_of

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
ASK, ANSWER, FAIL = "ask", "answer", "fail"
Answer = Callable[[str, Any], Awaitable[Any]]
"""Return the reply to a request; arguments: its name and argument."""


class ChannelClosed(Exception):
    """The other side has ended."""


class Channel:
    """One end of a channel. `answer` handles requests, each in a task of its own; `run` reads messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._handling: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def open(cls, end: socket.socket, answer: Answer) -> Channel:
        """Return a channel over one end of a socket pair."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, answer)

    async def ask(self, what: str, argument: Any = None) -> Any:
        """Send a request; return the reply. Raise the other side's `ServingError`, and `ChannelClosed`."""
        number = next(self._numbers)
        reply = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send([ASK, number, what, argument])
            return await reply
        finally:
            self._pending.pop(number, None)

    async def run(self) -> None:
        """Read messages until the other side has ended; open requests then raise `ChannelClosed`."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._take(*json.loads(await self._reader.readexactly(length)))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close the channel: fail open requests, and cancel the handling of the other side's."""
        self._closed = True
        self._writer.close()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(ChannelClosed())
                reply.exception()  # Marks it as retrieved, if the caller was cancelled.
        for task in self._handling:
            task.cancel()

    def _take(self, kind: str, number: int, *rest: Any) -> None:
        if kind == ASK:
            task = asyncio.create_task(self._reply(number, *rest))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)
            return
        reply = self._pending.get(number)
        if reply is None or reply.done():
            return  # The caller was cancelled.
        if kind == ANSWER:
            reply.set_result(rest[0])
        else:
            reply.set_exception(error_of(rest[0]))

    async def _reply(self, number: int, what: str, argument: Any) -> None:
        try:
            message = [ANSWER, number, await self._answer(what, argument)]
        except Exception as error:
            message = [FAIL, number, error_fields(as_serving_error(error, what))]
        with suppress(ChannelClosed):
            await self._send(message)

    async def _send(self, message: list[Any]) -> None:
        if self._closed:
            raise ChannelClosed
        data = json.dumps(message).encode()
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data)
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed from error
