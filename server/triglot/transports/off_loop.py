"""The coroutines of calls: codec work that takes too long for the event loop, on threads, and what follows it.

A call itself is a state that callbacks change, and may be compiled; a compiled module has no coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from triglot.core.roles import Cancellable
from triglot.core.tensor import MessageBytes
from triglot.transports.request_bytes import RequestBytes

T = TypeVar("T")

OFF_LOOP_BYTES = 128 * 1024
"""Text larger than this takes longer to process than the switch to a thread and back."""


class OneAtATime:
    """Runs work on threads, one piece at a time, in order of arrival. On the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns.

        The next piece waits until this one has ended, even if the caller is cancelled.
        """
        await self._turn.acquire()
        # Not in a local variable: an error's traceback would refer to it, a cycle for the garbage collector.
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        running = self._loop.run_in_executor(None, work)
        running.add_done_callback(self._on_end)
        return running

    def _on_end(self, _: asyncio.Future[Any]) -> None:
        self._turn.release()


async def run_sized(size: int, function: Callable[..., T], *arguments: object) -> T:
    """Return what `function` returns; it runs on a thread if `size` is above `OFF_LOOP_BYTES`."""
    if size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)


async def guarded(
    step: Callable[..., Coroutine[Any, Any, None]],
    arguments: Sequence[Any],
    cancelled: Callable[[], object],
    failed: Callable[[Exception], object],
) -> None:
    """Await a step of a call. Its cancellation and its errors are reported, not raised."""
    try:
        await step(*arguments)
    except asyncio.CancelledError:
        # A cancelled task would keep its error, whose frames hold the call, which holds the task.
        cancelled()
    except Exception as error:
        failed(error)


async def pass_on(
    use: Callable[[T], object], step: Callable[..., Coroutine[Any, Any, T]], *arguments: Any
) -> None:
    """Call `use` with what the coroutine function `step` returns."""
    use(await step(*arguments))


async def decode_large(
    request_bytes: RequestBytes, decode_size: Callable[[Any], int], decode: Callable[[Any], T], data: MessageBytes
) -> T:
    """Decode a request of more than `OFF_LOOP_BYTES`, whose bytes are reserved meanwhile.

    Raise `QueueFull` at the limit of buffered bytes, and what `decode` raises.
    """
    with request_bytes.reserve(OFF_LOOP_BYTES) as reserved:
        reserved.grow(len(data))
        return await run_sized(decode_size(data), decode, data)


async def wait_while(blocked: Callable[[], bool], waiter: Callable[[], asyncio.Future[None]]) -> None:
    """Wait for new futures of `waiter` as long as `blocked` returns True. Raise as `blocked`."""
    while blocked():
        await waiter()


async def take_once(
    blocked: Callable[[], bool], waiter: Callable[[], asyncio.Future[None]], take: Callable[[], T]
) -> T:
    """As `wait_while`; then return what `take` returns."""
    await wait_while(blocked, waiter)
    return take()


async def unchanged(value: T) -> T:
    """Return the value."""
    return value


async def send_slowly(
    encoded: Any,
    encode: Callable[[], Any],
    prepare: Callable[[Any], Coroutine[Any, Any, Any]],
    send: Callable[[Any], object],
    failed: Callable[[Exception], object],
) -> None:
    """Encode a response, unless it is `encoded` already, and prepare it; then call `send` with it.

    A cancellation ends it, errors are reported.
    """
    with suppress(asyncio.CancelledError):  # Otherwise the task would keep the error, and its frames.
        try:
            send(await prepare(await asyncio.to_thread(encode) if encoded is None else encoded))
        except Exception as error:
            failed(error)


async def cancel_until(stopped: asyncio.Future[Any], running: Collection[Cancellable], interval: float) -> None:
    """Cancel all that are `running`, every `interval` seconds, until `stopped` is done; then raise as it does."""
    while running and not stopped.done():
        # Cancelled repeatedly: user code may swallow a cancellation.
        for task in list(running):
            task.cancel()
        await asyncio.wait([stopped], timeout=interval)
    await stopped
