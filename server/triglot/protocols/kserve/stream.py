"""ModelStreamInfer: many requests and their responses on one call (spec 2.8).

Strategy: requests start as they arrive, within `StreamLimits`. Responses of ordinary models are sent in the order
of the requests; those of decoupled models as they come. What is ready is offered to the transport, for a burst of
requests all together. What the transport does not take is kept, and applies back-pressure to decoupled models and,
once it is much, to the requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from triglot.core.duplex import Duplex
from triglot.core.errors import ServingError, as_serving_error
from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.core.running import Cancellable
from triglot.protocols.kserve.stream_requests import ResponseSlot, StreamRequests
from triglot.scheduling.admission import Limits

MAX_UNSENT = 16
"""Unsent responses of one stream from which on decoupled models have to wait."""
MAX_IN_A_ROW = 64
"""Requests that are started in a row, after which other calls get a turn."""
RESPONSE_BYTES = 64
"""Memory of an unsent response besides its bytes."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one stream may hold; above it, its next request is not read.

    `requests` and `request_bytes` limit its open requests, `unread_bytes` the responses that wait for the client.
    """

    requests: int = 768
    request_bytes: int = sys.maxsize
    unread_bytes: int = MAX_UNREAD_BYTES

    @classmethod
    def within(cls, max_queue_size: int, limits: Limits, unread_bytes: int) -> StreamLimits:
        """Returns the limits with which one stream leaves a quarter of each queue to other clients."""
        requests = min(max_queue_size, limits.total_requests or max_queue_size)
        request_bytes = min(limits.model_bytes or sys.maxsize, limits.total_bytes or sys.maxsize)
        return cls(requests - requests // 4, request_bytes - request_bytes // 4, unread_bytes)


DEFAULTS = StreamLimits()


class _Unsent(deque[bytes]):
    """Encoded responses that wait to be sent; `memory` is what they take, in bytes."""

    memory = 0

    def append(self, response: bytes, /) -> None:
        self.memory += RESPONSE_BYTES + len(response)
        super().append(response)

    def popleft(self) -> bytes:
        response = super().popleft()
        self.memory -= RESPONSE_BYTES + len(response)
        return response


class InferStream:
    """One ModelStreamInfer call: the `StreamOutput` of its `requests`. On the event loop."""

    def __init__(self, requests: StreamRequests, limits: StreamLimits) -> None:
        self._handler = requests
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._running: set[Cancellable] = set()
        self._slots: deque[ResponseSlot] = deque()
        self._decoupled = 0
        """Number of running requests to decoupled models."""
        self._open_bytes = 0
        """Bytes of the open requests."""
        self._behind_bytes = 0
        """Bytes of the responses that wait for those of earlier requests."""
        self._ready = _Unsent()
        self._unsent_room = asyncio.Event()
        """Set while there is room for responses of decoupled models."""
        self._deferred: deque[Callable[[], None]] = deque()
        self._failure: ServingError | None = None
        """Error that ends the call, after the responses that are ready."""
        self._starting = self._full = self._send_scheduled = self._yielded = self._closed = False
        self._wakeup: asyncio.Future[None] | None = None
        self._all_ended: asyncio.Future[None] | None = None

    async def run(self, requests: Duplex) -> AsyncGenerator[bytes, None]:
        """Yields the encoded responses that `requests` does not take. Closing it cancels all running requests."""
        self._requests = requests
        try:
            requests.listen(self._start_requests)
            while not self._is_over:
                if self._ready:
                    self._yielded = True
                    yield self._ready.popleft()
                    self._yielded = False
                    self._send()
                elif self._failure is not None:
                    self._raise()
                else:
                    self._wakeup = self._loop.create_future()
                    await self._wakeup
        finally:
            await self._close()

    @property
    def _is_over(self) -> bool:
        """Whether the client has sent all requests, and all are answered (spec 0.12)."""
        return not (self._slots or self._decoupled or self._ready or self._failure) and self._requests.ended

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # Its traceback refers to this frame.

    async def _close(self) -> None:
        """Cancel the running requests, and wait for their end; if cancelled itself, cancel them again."""
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
            self._all_ended = self._loop.create_future()
            try:
                await self._all_ended
            except asyncio.CancelledError:
                cancelled = True
        for slot in self._slots:
            slot.answer = None
        if cancelled:
            raise asyncio.CancelledError

    def defer(self, work: Callable[[], None]) -> None:
        """Keep `work` until the requests are started, which happens only in `_start_requests`."""
        self._deferred.append(work)

    def start_task(self, work: Coroutine[Any, Any, None], never_began: Callable[[], None]) -> None:
        task = self._loop.create_task(work)
        self._running.add(task)

        def ended(_: object) -> None:
            if task.cancelled():  # Before its first step: later it handles the cancellation itself.
                never_began()
            self.untrack(task)

        task.add_done_callback(ended)

    def track(self, one: Cancellable) -> None:
        self._running.add(one)

    def untrack(self, one: Any) -> None:
        self._running.discard(one)
        if self._all_ended is not None and not self._running and not self._all_ended.done():
            self._all_ended.set_result(None)

    # --- requests ---

    def _start_requests(self) -> None:
        """Start the requests that have arrived, as many as may run."""
        if self._starting or self._closed:
            return
        self._starting = True
        try:
            for _ in range(MAX_IN_A_ROW):
                if not self._has_room:
                    self._offer()
                if self._failure is not None or not self._has_room or (data := self._requests.take()) is None:
                    break
                slot = ResponseSlot(len(data))
                self._slots.append(slot)
                self._open_bytes += slot.size
                self._handler.begin(data, slot, self)
            else:
                self._loop.call_soon(self._start_requests)
        except Exception as error:
            self._fail(as_serving_error(error, "reading a stream"))
        finally:
            self._starting = False
            self._full = self._failure is None and not self._has_room
            while self._deferred:
                self._deferred.popleft()()
        self._send()

    @property
    def _has_room(self) -> bool:
        """Whether one more request may run."""
        limits = self._limits
        return (
            len(self._slots) + self._decoupled < limits.requests
            and self._open_bytes < limits.request_bytes
            and self._ready.memory + self._behind_bytes < limits.unread_bytes
        )

    # --- answers ---

    def release_slot(self) -> None:
        self._decoupled += 1
        self._slots.pop()

    def finish(self, size: int) -> None:
        self._decoupled -= 1
        self._open_bytes -= size
        self._schedule_send()

    def set_response(self, slot: ResponseSlot, answer: bytes | ServingError) -> None:
        slot.answer = answer
        self._open_bytes -= slot.size
        if isinstance(answer, bytes):
            self._behind_bytes += len(answer)
        if self._slots and self._slots[0] is slot:
            self._advance()

    def _advance(self) -> None:
        """Move the responses at the head of the order to those ready to send."""
        slots = self._slots
        while slots and (answer := slots[0].answer) is not None:
            slots.popleft().answer = None  # An error's frames refer to the slot.
            if not isinstance(answer, bytes):
                self._fail(answer)
                continue
            self._behind_bytes -= len(answer)
            if self._failure is None:
                self._ready.append(answer)
        if len(self._running) == 1 and not self._starting:
            self._send()
        else:
            self._schedule_send()

    async def put(self, answer: bytes | ServingError) -> None:
        while len(self._ready) >= MAX_UNSENT:
            self._unsent_room.clear()
            await self._unsent_room.wait()
        if not isinstance(answer, bytes):
            self._fail(answer)
        elif self._failure is None:
            self._ready.append(answer)
        self._schedule_send()

    def _fail(self, failure: ServingError) -> None:
        if self._failure is None and not self._closed:
            self._failure = failure

    def _schedule_send(self) -> None:
        """Send what is ready in the next iteration of the loop, with what is added until then."""
        if not self._starting and not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Send or yield what is ready; then start more requests if there is room."""
        self._send_scheduled = False
        if self._closed:
            return
        self._offer()
        if self._full and self._has_room:
            self._start_requests()
        elif (
            self._wakeup is not None
            and not self._wakeup.done()
            and (self._ready or self._failure is not None or self._is_over)
        ):
            self._wakeup.set_result(None)

    def _offer(self) -> None:
        if self._ready and not self._yielded:
            self._requests.offer(self._ready)
        if len(self._ready) < MAX_UNSENT:
            self._unsent_room.set()
