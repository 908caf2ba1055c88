"""A call of a row, over any transport: decode, run, encode, map errors.

`grpc_calls.GrpcCall` and `rest.call.HttpCall` are its subclasses.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from triglot.core.call import Call
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import ModelNotLoaded, ServingError, Unauthenticated
from triglot.core.model_loading import when_loaded
from triglot.core.operation import ADMINISTRATION, WITHDRAWN
from triglot.core.roles import Cancellable
from triglot.core.running import CallCancelled, Defer, Running, Sink
from triglot.protocols.rows import InferenceHandler
from triglot.transports.off_loop import OFF_LOOP_BYTES, guarded, pass_on, run_sized, send_slowly, unchanged

SHUTTING_DOWN: Final = "the server is shutting down"
"""The message of calls that are ended or rejected because the server stops."""
LAST_MESSAGE_SECONDS: Final = 1.0
"""Seconds after its deadline in which a stream may still send its last message."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RowCall(Sink):
    """One call, as a `RunningCall`, and the sink of its responses: one, or with `streams` any number.

    On the event loop. A row with an `inference` needs no coroutine. Nothing runs before `_begin`; whatever ends
    the call calls `_stop`, once.
    """

    __slots__ = (
        "_callbacks",
        "_cancel_count",
        "_closed",
        "_defer",
        "_ends_after",
        "_has_ended",
        "_inference",
        "_is_change",
        "_request",
        "_running",
        "_sending",
        "call",
        "ends_at_deadline",
        "streams",
    )
    call: Call

    def __init__(self) -> None:
        self.ends_at_deadline = False
        """Whether the call ends at its deadline on its own, even if the model runs on: the loop runs none of
        its code.
        """
        self._defer: Defer | None = None
        """See `Schedule.put`."""
        self._has_ended = True
        self._inference: InferenceHandler | None = None
        self._is_change = False
        """Whether a change of the server has begun, which is finished without the client, too."""
        self._request: Any = None
        self._running: Cancellable | None = None
        """The task or the work that runs the call."""
        self.streams = False
        self._sending: asyncio.Task[None] | None = None
        """Encodes a response of a stream that takes long; those after it wait."""
        self._closed = False
        """Whether no more responses are sent: the call has ended, or does once those that wait are sent."""
        self._ends_after = False
        """Whether the stream ends after that response."""
        self._cancel_count = 0
        self._callbacks: list[Callable[[Any], object]] | None = None

    def _begin(self, inference: InferenceHandler | None, call: Call, defer: Defer | None = None) -> None:
        self._has_ended = False
        self._inference = inference
        self._defer = defer
        self.call = call

    # --- implemented per transport ---

    @abstractmethod
    def _run(self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Continue in a coroutine, as `_guarded` returns it."""

    @abstractmethod
    def _start_coroutine(self, request: Any) -> Running:
        """Start the request of a row without an `inference`."""

    @abstractmethod
    def _answer_size(self, answer: Any) -> int:
        """Return about how many bytes `_encode` processes one by one."""

    @abstractmethod
    def _encode(self, answer: Any) -> Any:
        """Return the response as it is sent; may run on a thread."""

    @abstractmethod
    def _send(self, encoded: Any) -> None:
        """Send the encoded response, and end the call."""

    @abstractmethod
    def _send_next(self, encoded: Any) -> bool:
        """Send an encoded response of a stream; returns whether there is room for another one."""

    @abstractmethod
    def _finish(self) -> None:
        """End a stream after its responses."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Send an error, and end the call. Must not store the error: its frames refer to the request."""

    @abstractmethod
    def _end_cancelled(self) -> None:
        """End the call, which was cancelled."""

    @abstractmethod
    def _must_end(self) -> bool:
        """Whether the server stops, and waits for calls no longer."""

    # --- the call ---

    def _guarded(
        self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> Coroutine[Any, Any, None]:
        return guarded(step, arguments, self._end_cancelled, self._fail)

    def _run_ended(self, running: Any) -> None:
        if self._running is running and not self._has_ended:  # Cancelled before its first step.
            self._end_cancelled()

    def _submit(self, request: Any) -> None:
        """Run the decoded request.

        Raise as `InferenceHandler.start`, and `Unauthenticated` if permission was withdrawn.
        """
        self.call.decoded()
        if self.call.permission.withdrawn:  # While the body arrived.
            raise Unauthenticated(WITHDRAWN)
        self._request = request
        inference = self._inference
        if inference is None:
            self._is_change = self.call.operation in ADMINISTRATION
            self._started(self._start_coroutine(request))
            return
        try:
            running = inference.start(request, self.call, self, self._defer)
        except ModelNotLoaded:
            start = partial(inference.start, request, self.call, self)
            self._run(pass_on, self._started, when_loaded, self.call, run_sized, 0, start)
        else:
            self._started(running)

    def _started(self, running: Running) -> None:
        """Note what runs the call, which may have ended already."""
        if not self._has_ended:
            self._running = running
            # A client that does not read its stream keeps that open.
            self.ends_at_deadline = running.task is None and not self.streams
            if self._cancel_count:
                running.cancel()
        elif not running.over:
            running.cancel()

    def send(self, response: Any, /) -> bool:
        """See `Sink`. Without `streams`, the only response, which ends the call."""
        if self._closed:
            return False
        inference = self._inference
        try:
            if not self.streams:
                self.call.answered()
            answer = response if inference is None else inference.answer(response, self._request)
            if self.streams:
                return self._send_answer(answer)
            self._respond(answer)
        except Exception as error:
            self._end_with_error(error)
        return True

    def _send_answer(self, answer: Any) -> bool:
        encoded = None if self._answer_size(answer) > OFF_LOOP_BYTES else self._encode(answer)
        if encoded is not None and not self._is_slow(encoded):
            self.call.sent(len(encoded))
            return self._send_next(encoded)
        encode = partial(self._encode, answer)
        sending = send_slowly(encoded, encode, self._prepare, self._send_prepared, self._end_with_error)
        self._sending = task = asyncio.get_running_loop().create_task(sending)
        task.add_done_callback(self._sent_slowly)
        return False

    def _is_slow(self, encoded: Any) -> bool:
        """Return whether `_prepared` takes long."""
        return False

    def _prepare(self, encoded: Any) -> Coroutine[Any, Any, Any]:
        """Count an encoded response of a stream; return a coroutine that returns it as it is sent."""
        self.call.sent(len(encoded))
        return self._prepared(encoded)

    def _prepared(self, encoded: Any) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that returns an encoded response as it is sent."""
        return unchanged(encoded)

    def _send_prepared(self, prepared: Any) -> None:
        self._sending = None
        if not self._closed and self._send_next(prepared):
            asyncio.get_running_loop().call_soon(self.resume)

    def _sent_slowly(self, task: asyncio.Task[None]) -> None:
        if self._sending not in (None, task):
            return  # The next response is being encoded already.
        self._sending = None
        if self._ends_after and not self._closed:
            if self._cancel_count:
                self._end_cancelled()
            else:
                self._finish()

    def resume(self) -> None:
        """Ask for the next responses of the stream: there is room."""
        if self._sending is None and isinstance(self._running, Running):
            self._running.resume()

    def _end_with_error(self, error: Exception) -> None:
        """Fail, and cancel what may still run."""
        running = self._running
        if not self._closed:
            self._fail(error)
        if running is not None and self.streams:
            running.cancel()

    def end(self, error: ServingError | None, /) -> None:
        """See `Sink`."""
        if self._closed:
            return
        if error is None:
            if not self.streams:
                return
            if self._sending is None:
                self._finish()
            else:
                self._ends_after = True
            return
        if isinstance(error, CallCancelled):
            self._end_cancelled()
            return
        if not self.streams:
            self.call.answered()
        inference = self._inference
        self._fail_run(error if inference is None else inference.map_error(error, self._request, self.call))

    def _fail_run(self, error: ServingError) -> None:
        """Send the error of what ran the call, and end it."""
        self._fail(error)

    def _respond(self, answer: Any) -> None:
        if self._answer_size(answer) > OFF_LOOP_BYTES:
            self._run(pass_on, self._send, asyncio.to_thread, self._encode, answer)
        else:
            self._send(self._encode(answer))

    def _stop(self) -> None:
        """Note the end of the call, and run its callbacks."""
        assert not self._has_ended
        self._has_ended = self._closed = True
        self._running = self._request = None
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback(self)

    # --- RunningCall ---

    def cancel(self) -> None:
        """Cancel the call: its client no longer waits for the response.

        A change of the server that has begun continues, so that the call ends with what it came to.
        """
        if self._is_change and not self._must_end():
            return
        self._cancel_count += 1
        if self._sending is not None:
            self._sending.cancel()
        if self._running is not None:
            self._running.cancel()

    def cancelling(self) -> int:
        """Return how often the call was cancelled; 0 once it has ended."""
        return 0 if self._has_ended else self._cancel_count

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._has_ended

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` when the call, which is still running, ends."""
        self._callbacks = [*(self._callbacks or ()), callback]
