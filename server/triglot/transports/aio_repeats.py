"""Calls that repeat others over grpc.aio, whose handlers are awaited: all they wait for is one future."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from triglot.core.errors import Code
from triglot.telemetry.observation import Observation
from triglot.transports.grpc_calls import UnaryHandler

Ordinary = tuple[Awaitable[Any], Observation]
"""What is to be encoded in the ordinary way, and what counts it."""


class _AwaitedReply:
    """A `Reply` that becomes the result of `told`, unless that was cancelled with the handler."""

    __slots__ = ("_handler", "defer", "told")

    def __init__(self, handler: UnaryHandler) -> None:
        loop = asyncio.get_running_loop()
        self._handler = handler
        self.defer: Callable[[Callable[[], None]], object] = loop.call_soon
        self.told: asyncio.Future[bytes | Ordinary] = loop.create_future()

    def respond(self, message: bytes, /) -> None:
        """See `Reply`."""
        if not self.told.done():
            self.told.set_result(message)

    def conclude(self, answer: Awaitable[Any], observed: Observation, /) -> None:
        """See `Reply`."""
        if self.told.done():
            observed.end(self._handler.left)
        else:
            self.told.set_result((answer, observed))

    def drop(self) -> None:
        """Nobody takes what has been told: what was not encoded has not been counted."""
        if not self.told.cancelled() and isinstance(told := self.told.result(), tuple):
            told[1].end(self._handler.left)

    def given_up(self) -> Code:
        """See `Reply`."""
        return self._handler.left


async def answer_repeated(handler: UnaryHandler, data: bytes, context: Any) -> bytes:
    """As `UnaryHandler.answer`, and quicker for a call that repeats others."""
    reply = _AwaitedReply(handler)
    repeated = handler.repeat(data, context, reply)
    if repeated is None:
        return await handler.answer(data, context)
    try:
        told = await reply.told
    except asyncio.CancelledError:
        if not repeated.cancel():
            reply.drop()
        raise
    return told if isinstance(told, bytes) else await handler.conclude(told[0], context, told[1])
