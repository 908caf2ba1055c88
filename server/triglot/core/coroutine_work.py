"""The adapters for coroutines and async iterators that answer requests, as `Running` and `Conversation`."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Self, cast

from triglot.core.errors import ServingError, as_serving_error, without_frames
from triglot.core.running import CallCancelled, Conversation, Requests, Running, Sink


class _TaskWork(Running):
    """Work that a task does; it ends when the task has ended. `name` is for the log."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink, name: str) -> None:
        self.over = False
        self._sink: Sink | None = sink
        task = self.task = asyncio.get_running_loop().create_task(self._run(sink, name))
        task.add_done_callback(self._never_began)

    @abstractmethod
    async def _answer(self, sink: Sink) -> None:
        """Send the responses. Raise `Exception`s, which end the work."""

    async def _run(self, sink: Sink, name: str) -> None:
        error: ServingError | None = None
        try:
            await self._answer(sink)
        except asyncio.CancelledError:
            # Not raised: the task would keep it, a cycle of task, frames and work.
            error = CallCancelled("the call was cancelled")
        except Exception as failure:
            error = without_frames(as_serving_error(failure, name))
        self._end(error)

    def _never_began(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self.over:
            self._discard()
            self._end(CallCancelled("the call was cancelled"))

    @abstractmethod
    def _discard(self) -> None:
        """Drop what has not been started."""

    def _end(self, error: ServingError | None) -> None:
        self.over = True
        sink, self._sink = self._sink, None
        assert sink is not None
        sink.end(error)

    def cancel(self) -> None:
        """Cancel the task; the sink gets the end when that has ended."""
        if not self.over and self.task is not None:
            self.task.cancel()


class CoroutineWork(_TaskWork):
    """A coroutine that answers one request: its result is the one response."""

    __slots__ = ("_answering",)

    def __init__(self, answering: Coroutine[Any, Any, Any], sink: Sink, name: str = "the request") -> None:
        self._answering = answering
        super().__init__(sink, name)

    async def _answer(self, sink: Sink) -> None:
        response = await self._answering
        self.over = True
        sink.send(response)

    def _discard(self) -> None:
        self._answering.close()

    def resume(self) -> None:
        """See `Running`. Nothing to do: there is one response."""


class IteratedRequests:
    """The decoded requests of a bidirectional stream, as an async iterator."""

    __slots__ = ("_arrived", "_decode", "_requests")

    def __init__(self, requests: Requests, decode: Callable[[Any], Any]) -> None:
        self._requests = requests
        self._decode = decode
        self._arrived = asyncio.Event()

    def receive(self) -> None:
        """Continue: requests have arrived, or the end."""
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next request. Raise `ServingError`."""
        while (request := self._requests.take()) is None:
            if self._requests.has_ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._decode(request)


class IteratedWork(_TaskWork, Conversation):
    """An async iterator over responses, of which the next one is asked for when the sink has room for it.

    `iterate` returns it; `requests` are those that it reads, on a bidirectional stream.
    """

    __slots__ = ("_iterate", "_requests", "_room")

    def __init__(
        self,
        iterate: Callable[[], AsyncIterator[Any]],
        sink: Sink,
        name: str,
        requests: IteratedRequests | None = None,
    ) -> None:
        self._iterate = iterate
        self._requests = requests
        self._room = asyncio.Event()
        super().__init__(sink, name)

    async def _answer(self, sink: Sink) -> None:
        async with aclosing(cast("AsyncGenerator[Any, None]", self._iterate())) as responses:
            async for response in responses:
                self._room.clear()
                if not sink.send(response):
                    await self._room.wait()

    def _discard(self) -> None:
        """See the base class. Nothing to do: the iterator does not exist yet."""

    def resume(self) -> None:
        """See `Running`."""
        self._room.set()

    def receive(self) -> None:
        """See `Conversation`."""
        if self._requests is not None:
            self._requests.receive()
