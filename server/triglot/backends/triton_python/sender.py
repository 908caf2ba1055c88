"""`InferenceResponseSender`: sends the responses to one request, on any thread and at any time."""

from __future__ import annotations

import threading
from typing import Protocol

from triglot.backends.triton_python.errors import TritonModelException
from triglot.backends.triton_python.response import InferenceResponse
from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError
from triglot.core.types import Answer
from triglot.model.reshaping import Reshaping

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
UNSENT = "Unable to send response."
DROPPED = Internal(
    "the model released the request's response sender without sending TRITONSERVER_RESPONSE_COMPLETE_FINAL"
)


class Outlet(Protocol):
    """The receiver of the responses to one request."""

    def put(self, answer: Answer | ServingError) -> None:
        """Pass on a response, or an error as the last one. Raise `TritonModelException` only for a response."""

    def end(self) -> None:
        """Mark the end of the responses."""


class ResponseChannel:
    """The channel from a model to the client of one request. Thread-safe.

    Only the request and its senders refer to it: when all of them are gone before the final flag was sent, no
    response can follow, and the request ends with an error. `has_sender`: whether a sender was created.
    `rescheduled`: whether the model rescheduled the request.
    """

    __slots__ = (
        "_has_ended",
        "_lock",
        "_outlet",
        "_sent",
        "call",
        "closed",
        "decoupled",
        "has_sender",
        "rescheduled",
        "reshaping",
    )  # fmt: skip

    def __init__(self, call: Call, outlet: Outlet, *, decoupled: bool, reshaping: Reshaping | None = None) -> None:
        self.call = call
        self.reshaping = reshaping
        self.decoupled = decoupled
        self.closed = self.has_sender = self.rescheduled = False
        self._sent = self._has_ended = False
        self._outlet = outlet
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send a response, and no more after it if it is `final`.

        Raise `TritonModelException` once closed; for a model that is not decoupled also for a second response,
        and for a final flag before the first.
        """
        answer = None if response is None else response.outcome(self.reshaping, final=final)
        with self._lock:
            if not self.decoupled and answer is not None and self._sent:
                raise TritonModelException(f"{UNSENT} Non-decoupled model cannot send more than one response.")
            if not self.decoupled and answer is None and not self._sent:
                raise TritonModelException(
                    f"{UNSENT} Non-decoupled model cannot send complete final before sending a response."
                )
            if self.closed:
                raise TritonModelException(f"{UNSENT} Response sender has been closed.")
            self._sent, self.closed = True, final
            had_ended = self._has_ended
            self._has_ended = had_ended or final or not self.decoupled or isinstance(answer, ServingError)
        if answer is not None and not had_ended:  # After an error, responses are dropped.
            self._outlet.put(answer)
        if final:
            self._outlet.end()

    def fail(self, error: ServingError) -> None:
        """End the responses with an error, unless they have ended."""
        with self._lock:
            had_ended, self._has_ended = self._has_ended or self.closed, True
            was_closed, self.closed = self.closed, True
        if not had_ended:
            self._outlet.put(error)
        if not was_closed:
            self._outlet.end()

    def __del__(self) -> None:
        # For a model with one response this cannot happen before `execute` has returned.
        if not self.closed:
            self.closed = True
            if not self._has_ended:
                self._outlet.put(Internal(DROPPED.message))
            self._outlet.end()


class InferenceResponseSender:
    """Sends the responses to one request; from `InferenceRequest.get_response_sender`."""

    __slots__ = ("_channel",)

    def __init__(self, channel: ResponseChannel) -> None:
        self._channel = channel

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL in `flags` it is the last one.

        Waits for a slow client only in the `execute` of this request alone, and while no request is queued.
        Responses that exceed the server's `max_unread_bytes` end the request with RESOURCE_EXHAUSTED; from then on
        `is_cancelled` returns True. Responses to a cancelled request, or after an error, are dropped. Raises
        `TritonModelException` after the final flag, for other flags, and for a response that exceeds the limit in
        the request's own `execute`.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send: response: expected an InferenceResponse, got {type(response).__name__}")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"{UNSENT} Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._channel.send(response, final=bool(flags))

    def is_cancelled(self) -> bool:
        """Whether the client cancelled the request, disconnected, or has not read too many responses."""
        return self._channel.call.cancelled
