"""Unary calls over grpc.aio, whose handlers are coroutines: each awaits a single future."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from triglot.core.errors import Code
from triglot.core.permission import Permission
from triglot.core.scattered import Scattered
from triglot.transports.aio.hang_up import host_of
from triglot.transports.grpc_calls import Trailing, UnaryHandler, make_call
from triglot.transports.shutdown import SHUTTING_DOWN
from triglot.transports.until_ended import cancel

Status = tuple[Code, str, Trailing]


class _Reply:
    """A `Reply` that can be awaited: `ended` is done once there is a message or a status."""

    __slots__ = ("_handler", "_loop", "defer", "ended", "message", "status", "trailing")

    def __init__(self, handler: UnaryHandler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self.defer: Callable[[Callable[[], None]], object] = self._loop.call_soon
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.message = b""
        self.trailing: Trailing = ()
        self.status: Status | None = None

    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """See `Reply`."""
        return self._loop.create_task(work)

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /) -> None:
        """See `Reply`."""
        self.message, self.trailing = bytes(message), trailing
        self._end()

    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """See `Reply`."""
        self.status = code, details, trailing
        self._end()

    def cancelled(self) -> None:
        """See `Reply`."""
        if self._handler.calls.stopping:
            self.refuse(Code.UNAVAILABLE, SHUTTING_DOWN, ())
        else:
            self.refuse(Code.CANCELLED, "the call was cancelled", ())

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def answer(handler: UnaryHandler, data: bytes, context: Any, permission: Permission) -> bytes:
    """Run a unary call; returns the response, or b"" if the call has been ended with a status."""
    reply = _Reply(handler)
    call = handler.start(data, make_call(context, permission, host_of(context.peer())), reply)
    try:
        await reply.ended
    except asyncio.CancelledError:
        await cancel(call)
        raise
    if reply.status is not None:
        await handler.calls.refuse(context, *reply.status)
    elif reply.trailing:
        context.set_trailing_metadata(reply.trailing)
    return reply.message
