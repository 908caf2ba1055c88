"""ModelStreamInfer: many requests and their answers on one call (spec 2.8).

Strategy: requests begin as they come, so many at the same time. Answers of ordinary models stand in a line, in
the order of the requests, until it is their turn; those of decoupled models stand in none. What may leave is
offered to the transport, all that a burst of requests makes together. What the transport does not take waits for
it, and holds the models up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from triglot.core.duplex import Duplex
from triglot.core.errors import ServingError, as_serving_error
from triglot.core.running import Cancellable
from triglot.protocols.kserve.stream_requests import Place, StreamRequests

MAX_IN_FLIGHT = 64
"""Requests of one stream that may run at the same time; the next is not read before one has ended."""
MAX_UNSENT = 16
"""Answers of one stream that may wait for the client before decoupled models are held up."""


class InferStream:
    """One call, whose `requests` run by themselves: see `Line`."""

    def __init__(self, requests: StreamRequests) -> None:
        self._asked = requests
        self._loop = asyncio.get_running_loop()
        self._running: set[Cancellable] = set()
        self._line: deque[Place] = deque()
        self._apart = 0
        """Requests to decoupled models that run."""
        self._ready: deque[bytes] = deque()
        self._room = asyncio.Event()
        """Set when there was room for answers of decoupled models."""
        self._deferred: deque[Callable[[], None]] = deque()
        self._failure: ServingError | None = None
        """What ends the call, after the answers that are ready."""
        self._taking = self._full = self._due = self._yielded = self._closed = False
        self._woken: asyncio.Future[None] | None = None
        self._rest: asyncio.Future[None] | None = None

    async def run(self, requests: Duplex) -> AsyncGenerator[bytes, None]:
        """The answers that `requests` does not take, encoded. Closing it cancels every request that still runs."""
        self._requests = requests
        try:
            requests.listen(self._take)
            while not self._is_over:
                if self._ready:
                    self._yielded = True
                    yield self._ready.popleft()
                    self._yielded = False
                    self._send()
                elif self._failure is not None:
                    self._raise()
                else:
                    self._woken = self._loop.create_future()
                    await self._woken
        finally:
            await self._close()

    @property
    def _is_over(self) -> bool:
        """Whether the client has sent everything, and all of it is answered (spec 0.12)."""
        return not (self._line or self._apart or self._ready or self._failure) and self._requests.ended

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # Its traceback has this frame.

    async def _close(self) -> None:
        """Cancel what runs, and wait for its end; it is cancelled again when this is."""
        self._closed = True
        self._failure = None
        cancelled = False
        try:
            await self._requests.close()
        except asyncio.CancelledError:
            cancelled = True
        while self._running:
            for one in tuple(self._running):
                one.cancel()
            if not self._running:
                break
            self._rest = self._loop.create_future()
            try:
                await self._rest
            except asyncio.CancelledError:
                cancelled = True
        for place in self._line:
            place.answer = None
        if cancelled:
            raise asyncio.CancelledError

    def defer(self, work: Callable[[], None]) -> None:
        """See `Line`: requests begin in `_take`, and nowhere else."""
        self._deferred.append(work)

    def begin(self, work: Coroutine[Any, Any, None], never_began: Callable[[], None]) -> None:
        """See `Line`."""
        task = self._loop.create_task(work)
        self._running.add(task)

        def ended(_: object) -> None:
            if task.cancelled():  # Else it would have taken that.
                never_began()
            self.ended(task)

        task.add_done_callback(ended)

    def runs(self, one: Cancellable) -> None:
        """See `Line`."""
        self._running.add(one)

    def ended(self, one: Any) -> None:
        """See `Line`."""
        self._running.discard(one)
        if self._rest is not None and not self._running and not self._rest.done():
            self._rest.set_result(None)

    # --- requests ---

    def _take(self) -> None:
        """Begin the requests that are there, as many as may run."""
        if self._taking or self._closed:
            return
        self._taking = True
        line, ready, requests = self._line, self._ready, self._requests
        try:
            while self._failure is None and len(line) + self._apart < MAX_IN_FLIGHT:
                if len(ready) >= MAX_IN_FLIGHT:
                    self._offer()
                    if len(ready) >= MAX_IN_FLIGHT:
                        break
                if (data := requests.take()) is None:
                    break
                place = Place()
                line.append(place)
                self._asked.begin(data, place, self)
        except Exception as error:
            self._fail(as_serving_error(error, "reading a stream"))
        finally:
            self._taking = False
            self._full = self._failure is None and not self._has_room
            while self._deferred:
                self._deferred.popleft()()
        self._send()

    @property
    def _has_room(self) -> bool:
        """Whether one more request may run."""
        return len(self._line) + self._apart < MAX_IN_FLIGHT and len(self._ready) < MAX_IN_FLIGHT

    # --- answers ---

    def step_out(self, place: Place) -> None:
        """See `Line`; what comes after it must not overtake what came before it."""
        self._apart += 1
        self._line.remove(place)
        self._advance()

    def left(self) -> None:
        """See `Line`."""
        self._apart -= 1
        self._soon()

    def say(self, place: Place, answer: bytes | ServingError) -> None:
        """See `Line`."""
        place.answer = answer
        if self._line and self._line[0] is place:
            self._advance()

    def _advance(self) -> None:
        """Those at the head of the line that have their answers leave it."""
        line = self._line
        while line and (answer := line[0].answer) is not None:
            line.popleft().answer = None  # An error's frames have the place.
            if not isinstance(answer, bytes):
                self._fail(answer)
            elif self._failure is None:
                self._ready.append(answer)
        if len(self._running) == 1 and not self._taking:
            self._send()
        else:
            self._soon()

    async def put(self, answer: bytes | ServingError) -> None:
        """See `Line`."""
        while len(self._ready) >= MAX_UNSENT:
            self._room.clear()
            await self._room.wait()
        if not isinstance(answer, bytes):
            self._fail(answer)
        elif self._failure is None:
            self._ready.append(answer)
        self._soon()

    def _fail(self, failure: ServingError) -> None:
        if self._failure is None and not self._closed:
            self._failure = failure

    def _soon(self) -> None:
        """Send what is ready, together with what else there is by then."""
        if not self._taking and not self._due:
            self._due = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """What is ready leaves, or is yielded; then there may be room for more."""
        self._due = False
        if self._closed:
            return
        self._offer()
        if self._full and self._has_room:
            self._take()
        elif self._ready or self._failure is not None or self._is_over:
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _offer(self) -> None:
        if self._ready and not self._yielded:
            self._requests.offer(self._ready)
        if len(self._ready) < MAX_UNSENT:
            self._room.set()
