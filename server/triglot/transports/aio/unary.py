"""Unary calls over grpc.aio, whose handlers are coroutines: each awaits a single future."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from triglot.core.errors import Code
from triglot.core.permission import Permission
from triglot.core.scattered import Scattered
from triglot.transports.aio.hang_up import host_of
from triglot.transports.grpc_calls import GrpcCall, Trailing, UnaryHandler, make_call
from triglot.transports.shutdown import SHUTTING_DOWN
from triglot.transports.until_ended import cancel

Status = tuple[Code, str, Trailing]


class _AioCall(GrpcCall):
    """A unary call that can be awaited: `answered` is done once there is a message or a status."""

    __slots__ = ("_loop", "answered", "message", "status", "trailing")

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = self._loop.create_future()
        self.message = b""
        self.trailing: Trailing = ()
        self.status: Status | None = None

    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """See `GrpcCall`."""
        return self._loop.create_task(work)

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /) -> None:
        """See `GrpcCall`."""
        self.message, self.trailing = bytes(message), trailing
        self._answer()

    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """See `GrpcCall`."""
        self.status = code, details, trailing
        self._answer()

    def cancelled(self) -> None:
        """See `GrpcCall`."""
        if self._unary.calls.stopping:
            self.refuse(Code.UNAVAILABLE, SHUTTING_DOWN, ())
        else:
            self.refuse(Code.CANCELLED, "the call was cancelled", ())

    def _answer(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)


async def answer(handler: UnaryHandler, data: bytes, context: Any, permission: Permission) -> bytes:
    """Run a unary call; returns the response, or b"" if the call has been ended with a status."""
    running = _AioCall()
    call = make_call(context, permission, host_of(context.peer()))
    running.start_row(handler, data, call, asyncio.get_running_loop().call_soon)
    try:
        await running.answered
    except asyncio.CancelledError:
        await cancel(running)
        raise
    if running.status is not None:
        await handler.calls.refuse(context, *running.status)
    elif running.trailing:
        context.set_trailing_metadata(running.trailing)
    return running.message
