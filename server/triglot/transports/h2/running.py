"""Runs the handlers of calls, and ends the calls as these do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from triglot.core.errors import Code, ServingError
from triglot.protocols import Kind
from triglot.telemetry.observation import Observation
from triglot.transports.call_task import CallTask
from triglot.transports.grpc_calls import UnaryHandler, fitting
from triglot.transports.h2.body import StreamGone
from triglot.transports.h2.messages import Message, unpacked
from triglot.transports.h2.rpc import Rpc
from triglot.transports.shutdown import SHUTTING_DOWN

log = logging.getLogger(__name__)


def run_unary(rpc: Rpc, message: Message) -> None:
    """A call with one request and one answer; it may have ended when this returns."""
    unary = rpc.protocol.server.repeating.get(rpc.head.path)
    if unary is not None and type(message) is bytes and _repeats(rpc, message, unary):
        return
    _run(rpc, _unary(rpc, _answer(rpc, message)))


def _repeats(rpc: Rpc, message: bytes, unary: UnaryHandler) -> bool:
    """Whether it is a call that repeats another one; it has begun then."""
    repeated = unary.repeat(message, rpc, _Reply(rpc, unary))
    if repeated is not None and not repeated.over:
        rpc.task = repeated
        rpc.protocol.server.tasks.add(repeated)
    return repeated is not None


def _run(rpc: Rpc, work: Coroutine[Any, Any, None]) -> None:
    tasks = rpc.protocol.server.tasks
    task = rpc.task = CallTask(work, rpc.protocol.loop, tasks.discard)
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


async def _unary(rpc: Rpc, answer: Coroutine[Any, Any, bytes]) -> None:
    try:
        rpc.respond(await answer)
    except asyncio.CancelledError:
        _cancelled(rpc)
    except Exception as error:
        _failed(rpc, error)


async def _answer(rpc: Rpc, message: Message) -> bytes:
    data = message if type(message) is bytes else await _unpacked(rpc, message)
    del message
    answer: bytes = await rpc.handle(data, rpc)
    return answer


class _Reply:
    """To a call that repeats another one: see `Reply`."""

    __slots__ = ("_rpc", "_unary")

    def __init__(self, rpc: Rpc, unary: UnaryHandler) -> None:
        self._rpc = rpc
        self._unary = unary

    def respond(self, message: bytes) -> None:
        """See `Reply`."""
        self._end()
        self._rpc.respond(message)

    def conclude(self, answer: Coroutine[Any, Any, Any], observed: Observation) -> None:
        """See `Reply`."""
        self._end()
        rpc = self._rpc
        _run(rpc, _unary(rpc, self._unary.conclude(answer, rpc, observed)))

    def left(self) -> Code:
        """See `Reply`."""
        self._end()
        _cancelled(self._rpc)
        return self._unary.left

    def _end(self) -> None:
        if (repeated := self._rpc.task) is not None:
            self._rpc.protocol.server.tasks.discard(repeated)


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
