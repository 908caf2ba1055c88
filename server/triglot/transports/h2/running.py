"""Runs the handlers of calls, and ends the calls as these do."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from triglot.core.errors import Code, ServingError
from triglot.protocols import Kind
from triglot.transports.call_task import CallTask
from triglot.transports.grpc_calls import fitting
from triglot.transports.h2.body import StreamGone
from triglot.transports.h2.messages import Message, unpacked
from triglot.transports.h2.rpc import Rpc
from triglot.transports.shutdown import SHUTTING_DOWN

log = logging.getLogger(__name__)


def run_unary(rpc: Rpc, message: Message) -> None:
    """A call with one request and one answer; it may have ended when this returns."""
    tasks = rpc.protocol.server.tasks
    task = rpc.task = CallTask(_unary(rpc, message), rpc.protocol.loop, tasks.discard)
    tasks.add(task)
    task.start()


def run_stream(rpc: Rpc, requests: Any) -> None:
    """A call with many answers. `requests`: the one message, or an iterator over all that come."""
    tasks = rpc.protocol.server.tasks
    task = rpc.task = rpc.protocol.loop.create_task(_stream(rpc, requests))
    tasks.add(task)
    task.add_done_callback(tasks.discard)


# A cancellation ends here: a task that is cancelled keeps the error, whose frames hold the call, which has the
# task: a circle that only the garbage collector would open.


async def _unary(rpc: Rpc, message: Message) -> None:
    try:
        data = message if type(message) is bytes else await _unpacked(rpc, message)
        del message
        rpc.respond(await rpc.handle(data, rpc))
    except asyncio.CancelledError:
        _cancelled(rpc)
    except Exception as error:
        _failed(rpc, error)


async def _stream(rpc: Rpc, requests: Any) -> None:
    try:
        if rpc.kind is Kind.SERVER_STREAM:
            requests = await _unpacked(rpc, requests)
        await rpc.handle(requests, rpc)
        rpc.finish()
    except StreamGone:
        return
    except asyncio.CancelledError:
        _cancelled(rpc)
    except Exception as error:
        _failed(rpc, error)


async def _unpacked(rpc: Rpc, message: Message) -> bytes | memoryview:
    """The message as the client meant it. Raises `ServingError`."""
    return await unpacked(message, rpc.head.encoding, rpc.protocol.server.most_bytes)


def _cancelled(rpc: Rpc) -> None:
    if rpc.protocol.server.stopping:
        rpc.finish(int(Code.UNAVAILABLE), SHUTTING_DOWN)
    else:
        rpc.finish(int(Code.CANCELLED), "the call was cancelled")


def _failed(rpc: Rpc, error: Exception) -> None:
    """An error before the handler, which tells its own ones."""
    if isinstance(error, ServingError):
        rpc.finish(int(error.code), fitting(error.message))
    else:
        log.error("%s: an error that no handler told", rpc.head.path, exc_info=error)
        rpc.finish(int(Code.INTERNAL), "internal error")
