"""A call of a row with one response, over any transport: decode, run, encode, map errors.

`grpc_calls.GrpcCall` and `rest.call.HttpCall` are its subclasses.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import ServingError, Unauthenticated
from triglot.core.operation import ADMINISTRATION
from triglot.core.permission import WITHDRAWN
from triglot.core.running import CallCancelled, Cancellable, Defer, Running, Sink
from triglot.protocols.rows import InferenceHandler
from triglot.transports.off_loop import OFF_LOOP_BYTES


class RowCall(Sink):
    """One call with one response, as a `RunningCall`. On the event loop.

    A row with an `inference` needs no coroutine. Nothing runs before `_begin`; whatever ends the call calls
    `_stop`, once.
    """

    __slots__ = (
        "_callbacks",
        "_cancel_count",
        "_defer",
        "_has_ended",
        "_inference",
        "_is_change",
        "_request",
        "_running",
        "call",
        "ends_at_deadline",
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
        """Continue in a coroutine, `_guarded(step, *arguments)`."""

    @abstractmethod
    async def _await_row(self, request: Any) -> Any:
        """Returns the response of a row without an `inference`."""

    @abstractmethod
    def _answer_size(self, answer: Any) -> int:
        """Returns about how many bytes `_encode` processes one by one."""

    @abstractmethod
    def _encode(self, answer: Any) -> Any:
        """Returns the response as it is sent; may run on a thread."""

    @abstractmethod
    def _send(self, encoded: Any) -> None:
        """Send the encoded response, and end the call."""

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

    async def _guarded(self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        try:
            await step(*arguments)
        except asyncio.CancelledError:
            self._end_cancelled()
        except Exception as error:
            self._fail(error)

    def _run_ended(self, running: Any) -> None:
        if self._running is running and not self._has_ended:  # Cancelled before its first step.
            self._end_cancelled()

    def _submit(self, request: Any) -> None:
        """Run the decoded request.

        Raises as `InferenceHandler.start`, and `Unauthenticated` if permission was withdrawn.
        """
        self.call.decoded()
        if self.call.permission.withdrawn:  # While the body arrived.
            raise Unauthenticated(WITHDRAWN)
        self._request = request
        if self._inference is None:
            self._is_change = self.call.operation in ADMINISTRATION
            self._run(self._await, request)
            return
        running: Running = self._inference.start(request, self.call, self, self._defer)
        if not self._has_ended:
            self._running = running
            self.ends_at_deadline = running.task is None
            if self._cancel_count:
                running.cancel()

    async def _await(self, request: Any) -> None:
        answer = await self._await_row(request)
        self.call.answered()
        self._respond(answer)

    def send(self, response: Any, /) -> bool:
        """See `Sink`: the only response, which ends the call."""
        self.call.answered()
        inference = self._inference
        assert inference is not None
        try:
            self._respond(inference.answer(response, self._request))
        except Exception as error:
            self._fail(error)
        return True

    def end(self, error: ServingError | None, /) -> None:
        """See `Sink`."""
        if error is None:
            return
        if isinstance(error, CallCancelled):
            self._end_cancelled()
            return
        self.call.answered()
        assert self._inference is not None
        self._fail(self._inference.map_error(error, self._request, self.call))

    def _respond(self, answer: Any) -> None:
        if self._answer_size(answer) > OFF_LOOP_BYTES:
            self._run(self._encode_long, answer)
        else:
            self._send(self._encode(answer))

    async def _encode_long(self, answer: Any) -> None:
        self._send(await asyncio.to_thread(self._encode, answer))

    def _stop(self) -> None:
        """Note the end of the call, and run its callbacks."""
        assert not self._has_ended
        self._has_ended = True
        self._running = self._request = None
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback(self)

    # --- RunningCall ---

    def cancel(self) -> None:
        """Cancel the call: its client no longer waits for the response.

        A change of the server that has begun goes on, so that the call ends with what it came to.
        """
        if self._is_change and not self._must_end():
            return
        self._cancel_count += 1
        if self._running is not None:
            self._running.cancel()

    def cancelling(self) -> int:
        """Returns how often the call was cancelled; 0 once it has ended."""
        return 0 if self._has_ended else self._cancel_count

    def done(self) -> bool:
        """Returns whether the call has ended."""
        return self._has_ended

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` when the call, which is still running, ends."""
        self._callbacks = [*(self._callbacks or ()), callback]
