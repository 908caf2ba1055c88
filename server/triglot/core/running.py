"""The convention for work with one response or many: a `Sink` takes them, a `Running` gives them.

Strategy: the caller that wants responses starts the work with a `Sink`, and gets a `Running`, on the event
loop. Work with one response is a stream of one. Nothing awaits: a coroutine for each call would cost as much
as running a small model.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from triglot.core.errors import Cancelled, ServingError

Defer = Callable[[Callable[[], None]], object]
"""Runs a function soon, on the event loop, as `call_soon` does."""


class CallCancelled(Cancelled):
    """The caller cancelled: nobody waits for the response."""


class Sink(ABC):
    """Where responses go. `end` is called once, after the last `send`; maybe before the work's start returns."""

    __slots__ = ()

    @abstractmethod
    def send(self, response: Any, /) -> bool:
        """Take one response: an `InferenceResponse`, or what a model that takes a protocol's messages returned.

        Return False if the next one has to wait until `Running.resume` is called.
        """

    @abstractmethod
    def end(self, error: ServingError | None, /) -> None:
        """Take the end, with the error if it failed; `CallCancelled` if it was cancelled.

        Must not keep the error: its frames may refer to the request.
        """

    def send_all(self, responses: deque[Any], /) -> bool:
        """Take and remove responses as long as there is room; returns what the last `send` did, else True."""
        while responses:
            if not self.send(responses.popleft()):
                return False
        return True


class Running(ABC):
    """Work that was started with a `Sink`.

    `task` runs its code on the event loop, if any. `over`: it has ended.
    """

    __slots__ = ("over", "task")
    over: bool
    task: asyncio.Task[None] | None

    @abstractmethod
    def cancel(self) -> None:
        """Cancel it: its responses are no longer needed. It ends as soon as its code on the loop allows."""

    @abstractmethod
    def resume(self) -> None:
        """Send on: the sink, which has returned False, has room for the next response."""


class Requests(ABC):
    """The requests of a bidirectional stream that have arrived. On the event loop."""

    __slots__ = ()

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all requests were taken, and no more can arrive."""

    @abstractmethod
    def take(self) -> Any:
        """Return the next request, or None if none has arrived. Raise `ServingError`."""


class Conversation(Running):
    """Work on a bidirectional stream, which takes its `Requests` as it has room for them."""

    __slots__ = ()

    @abstractmethod
    def receive(self) -> None:
        """Take requests: some have arrived, or the end. Called once for requests that arrive together."""


class Watcher(ABC):
    """Observes the responses of one request: its trace, its record."""

    __slots__ = ()

    @abstractmethod
    def on_response(self, response: Any) -> None:
        """Note one response of a stream, before it is sent."""

    @abstractmethod
    def on_end(self, response: Any) -> None:
        """Note the end; with the response of a request that has one, else None."""


class Cancellable(Protocol):
    """Anything that can be cancelled. On the event loop."""

    def cancel(self) -> object:
        """Cancel it: its result is no longer needed. It ends as soon as its code allows."""


class RunningCall(Cancellable, Protocol):
    """A call of a transport, with the methods of `asyncio.Task` that its owner needs."""

    def cancelling(self) -> int:
        """Return the number of pending cancellations, as `asyncio.Task.cancelling` does."""

    def done(self) -> bool:
        """Whether it has ended."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call `callback` with this object once it has ended; it has not ended yet."""


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

    __slots__ = ("_ended", "_error", "_reader", "_responses", "_running")

    def __init__(self, start: Callable[[Sink], Running]) -> None:
        self._responses: list[Any] = []
        self._ended = False
        self._error: ServingError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._running: Running | None = None
        running = start(self)
        if not self._ended:
            self._running = running

    def send(self, response: Any, /) -> bool:
        """See `Sink`."""
        self._responses.append(response)
        self._wake()
        return False

    def end(self, error: ServingError | None, /) -> None:
        """See `Sink`."""
        self._ended, self._error = True, error
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
        while not self._responses and not self._ended:
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
