"""ModelStreamInfer: many requests and their responses on one call (spec 2.8).

Strategy: requests start as they arrive, within `StreamLimits`. Responses of ordinary models are sent in the order
of the requests; those of decoupled models as they come. What is ready is sent all together for a burst of
requests. What the transport has no room for is kept, and applies back-pressure to decoupled models and, once it is
much, to the requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from triglot.core.errors import ServingError, as_serving_error
from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.core.roles import Cancellable
from triglot.core.running import CallCancelled, Conversation, Requests, Sink
from triglot.protocols.kserve.stream_requests import ResponseSlot, StreamRequests
from triglot.scheduling.loaded_version import Limits

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
        """Return the limits with which one stream leaves a quarter of each queue to other clients."""
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


class InferStream(Conversation):
    """One ModelStreamInfer call: the `StreamOutput` of its requests, which `handler` runs. On the event loop.

    It takes them from `requests`, and sends their encoded responses to `sink`.
    """

    def __init__(self, handler: StreamRequests, limits: StreamLimits, requests: Requests, sink: Sink) -> None:
        self.over = False
        self.task = None
        self._handler = handler
        self._limits = limits
        self._requests = requests
        self._sink = sink
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
        self._waiting: deque[Callable[[], None]] = deque()
        """Ask for responses of decoupled models, when there is room for them."""
        self._deferred: deque[Callable[[], None]] = deque()
        self._failure: ServingError | None = None
        """Error that ends the call, after the responses that are ready."""
        self._sink_has_room = True
        self._starting = self._full = self._send_scheduled = self._ending = False

    def receive(self) -> None:
        """See `Conversation`: start the requests that have arrived, as many as may run."""
        if self._starting or self._ending:
            return
        self._starting = True
        try:
            for _ in range(MAX_IN_A_ROW):
                if not self._has_room:
                    self._send_ready()
                if self._failure is not None or not self._has_room or (data := self._requests.take()) is None:
                    break
                slot = ResponseSlot(len(data))
                self._slots.append(slot)
                self._open_bytes += slot.size
                self._handler.begin(data, slot, self)
            else:
                self._loop.call_soon(self.receive)
        except Exception as error:
            self._fail(as_serving_error(error, "reading a stream"))
        finally:
            self._starting = False
            self._full = self._failure is None and not self._has_room
            while self._deferred:
                self._deferred.popleft()()
        self._send()

    def resume(self) -> None:
        """See `Running`."""
        self._sink_has_room = True
        self._send()

    def cancel(self) -> None:
        """Cancel the call: its running requests are cancelled, and it ends once they have."""
        if self.over:
            return
        if not self._ending:
            self._failure = CallCancelled("the call was cancelled")
        self._end()

    def _end(self) -> None:
        """Cancel the running requests; the call ends when they have."""
        self._ending = True
        for running in tuple(self._running):
            running.cancel()
        if not self._running:
            self._finish()

    def _finish(self) -> None:
        if self.over:
            return
        self.over = True
        for slot in self._slots:
            slot.answer = None  # An error's frames may refer to the slot.
        self._waiting.clear()
        failure, self._failure = self._failure, None
        self._sink.end(failure)

    @property
    def _is_complete(self) -> bool:
        """Whether the client has sent all requests, and all are answered (spec 0.12)."""
        return not (self._slots or self._decoupled) and self._requests.has_ended

    # --- what runs ---

    def defer(self, work: Callable[[], None]) -> None:
        """Keep `work` until the requests are started, which happens only in `receive`."""
        self._deferred.append(work)

    def start_task(self, work: Coroutine[Any, Any, None], never_began: Callable[[], None]) -> None:
        task = self._loop.create_task(work)
        self._running.add(task)

        def has_ended(_: object) -> None:
            if task.cancelled():  # Before its first step: later it handles the cancellation itself.
                never_began()
            self.untrack(task)

        task.add_done_callback(has_ended)

    def track(self, running: Cancellable) -> None:
        self._running.add(running)

    def untrack(self, running: Any) -> None:
        self._running.discard(running)
        if self._ending and not self._running:
            self._finish()

    @property
    def _has_room(self) -> bool:
        """Whether one more request may run."""
        limits = self._limits
        return (
            len(self._slots) + self._decoupled < limits.requests
            and self._open_bytes < limits.request_bytes
            and self._ready.memory + self._behind_bytes < limits.unread_bytes
        )

    # --- responses ---

    def release_slot(self, slot: ResponseSlot) -> None:
        self._decoupled += 1
        if self._slots[-1] is slot:
            self._slots.pop()
        else:  # Its model was loaded first, and others followed.
            self._slots.remove(slot)
            self._advance()

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

    def put(self, answer: bytes | ServingError, resume: Callable[[], None]) -> bool:
        if not isinstance(answer, bytes):
            self._fail(answer)
        elif self._failure is None:
            self._ready.append(answer)
        self._schedule_send()
        if len(self._ready) < MAX_UNSENT:
            return True
        self._waiting.append(resume)
        return False

    def _fail(self, failure: ServingError) -> None:
        if self._failure is None and not self._ending:
            self._failure = failure

    def _schedule_send(self) -> None:
        """Send what is ready in the next iteration of the loop, with what is added until then."""
        if not self._starting and not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Send what is ready; then start more requests if there is room, or end."""
        self._send_scheduled = False
        if self._ending:
            return
        self._send_ready()
        if self._full and self._has_room:
            self.receive()
        elif not self._ready and (self._failure is not None or self._is_complete):
            self._end()

    def _send_ready(self) -> None:
        if self._ready and self._sink_has_room:
            self._sink_has_room = self._sink.send_all(self._ready)
        while self._waiting and len(self._ready) < MAX_UNSENT:
            self._waiting.popleft()()
