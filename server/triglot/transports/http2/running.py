"""Runs the handlers of calls, and ends the calls as these do."""

from __future__ import annotations

import asyncio
from typing import Any

from triglot.protocols.rows import Kind
from triglot.transports.http2.body import MOST_UNREAD_BYTES, StreamGone
from triglot.transports.http2.messages import Message, Packed, unpacked
from triglot.transports.http2.rpc import Rpc


def run_unary(rpc: Rpc, message: Message) -> None:
    """A call with one request and one answer; it may have ended when this returns."""
    if isinstance(message, Packed):
        task = rpc.run(_unpack_and_start(rpc, message))
        if not task.done() and not rpc.over:
            rpc.task = task
    else:
        _start(rpc, message)


def _start(rpc: Rpc, message: Any) -> None:
    call = rpc.handler.start(message, rpc, rpc)
    if not call.done():
        rpc.task = call


def run_stream(rpc: Rpc, requests: Any) -> None:
    """A call with many answers. `requests`: the one message, or an iterator over all that come."""
    tasks = rpc.protocol.server.tasks
    task = rpc.task = rpc.protocol.loop.create_task(_stream(rpc, requests))
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _unpack_and_start(rpc: Rpc, message: Packed) -> None:
    # A cancellation ends here: a task that is cancelled keeps the error, whose frames hold the call, which has the
    # task: a circle that only the garbage collector would open.
    try:
        _start(rpc, await _unpacked(rpc, message))
    except asyncio.CancelledError:
        rpc.cancelled()
    except Exception as error:
        rpc.failed(error)


async def _stream(rpc: Rpc, requests: Any) -> None:
    try:
        if rpc.kind is Kind.SERVER_STREAM:
            requests = await _unpacked(rpc, requests)
        await rpc.handler(requests, rpc)
        rpc.finish()
    except StreamGone:
        return
    except asyncio.CancelledError:
        rpc.cancelled()
    except Exception as error:
        rpc.failed(error)


async def _unpacked(rpc: Rpc, message: Message) -> bytes | memoryview:
    """The message as the client meant it. Raises `ServingError`."""
    server = rpc.protocol.server
    with server.request_bytes.reserve(MOST_UNREAD_BYTES) as reserved:
        return await unpacked(message, rpc.head.encoding, server.most_bytes, reserved)
