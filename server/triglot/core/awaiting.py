"""The adapters for code that awaits running work: `Responses`, to iterate over what it sends, and `cancel`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from triglot.core.errors import ServingError
from triglot.core.running import Running, Sink


async def cancel(running: Running) -> None:
    """Cancel it, and wait until its code on the loop has ended."""
    running.cancel()
    waited = False
    while not waited and not running.over and (task := running.task) is not None:
        try:
            await asyncio.wait([task])
            waited = True
        except asyncio.CancelledError:
            running.cancel()  # Again, since user code may have suppressed the first cancellation.


class Responses(Sink):
    """The adapter for code that awaits: iterates over the responses of the work that `start` starts.

    The next response is made only when it is asked for. Close it, with `aclosing`, unless it was read to its end.
    """

    __slots__ = ("_error", "_has_ended", "_reader", "_responses", "_running")

    def __init__(self, start: Callable[[Sink], Running]) -> None:
        self._responses: list[Any] = []
        self._has_ended = False
        self._error: ServingError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._running: Running | None = None
        running = start(self)
        if not self._has_ended:
            self._running = running

    def send(self, response: Any, /) -> bool:
        """See `Sink`."""
        self._responses.append(response)
        self._wake()
        return False

    def end(self, error: ServingError | None, /) -> None:
        """See `Sink`."""
        self._has_ended, self._error = True, error
        self._running = None  # It refers to this sink.
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        """Return the next response. Raise the `ServingError` that ended the work.

        If this is cancelled, the work is cancelled, too, and its code on the loop awaited.
        """
        if not self._responses and self._running is not None:
            self._running.resume()
        while not self._responses and not self._has_ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                await self.aclose()
                raise
        if self._responses:
            return self._responses.pop(0)
        error, self._error = self._error, None
        if error is None:
            raise StopAsyncIteration
        try:
            raise error
        finally:
            del error  # Its traceback refers to this frame.

    async def only(self) -> Any:
        """Return the response of work that sends one. Raise as iterating does."""
        response = await anext(self)
        await self.aclose()
        return response

    async def aclose(self) -> None:
        """Cancel the work unless it has ended, and wait until its code on the loop has ended."""
        if self._running is not None:
            await cancel(self._running)
