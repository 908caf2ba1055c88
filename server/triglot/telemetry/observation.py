"""One call, from its first byte to its last, as the transports see it."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from triglot.core.call import Call
from triglot.core.errors import Code

if TYPE_CHECKING:
    from triglot.telemetry.store import Endpoint


DEADLINE_SLACK = 0.02
"""Seconds before a call's deadline in which its end is put down to it: the client's clock has started earlier."""


class Observation:
    """In flight from its making until `end`; the time between `decoded` and `answered` is not the codec's.

    `bytes_in`: what is received already.
    """

    __slots__ = ("_bytes_in", "_bytes_out", "_call", "_codec_seconds", "_endpoint", "_lap", "_started")

    def __init__(self, endpoint: Endpoint, call: Call, bytes_in: int = 0) -> None:
        endpoint.in_flight += 1
        call.counted = True
        self._endpoint = endpoint
        self._call = call
        self._bytes_in = bytes_in
        self._bytes_out = 0
        self._codec_seconds = 0.0
        self._started = self._lap = perf_counter()

    def received(self, size: int) -> None:
        """A body of `size` bytes has come; decoding begins."""
        self._bytes_in += size
        self._lap = perf_counter()

    def decoded(self) -> None:
        """The request has been decoded, since the start or `received`."""
        self._codec_seconds += perf_counter() - self._lap

    def answered(self) -> None:
        """There is an answer to encode."""
        self._lap = perf_counter()

    def sent(self, size: int) -> None:
        """`size` bytes are on their way; of an answer of a stream nobody measures how long they took to encode."""
        self._bytes_out += size

    def encoded(self, size: int) -> None:
        """The answer has been encoded into `size` bytes, since `answered`."""
        self._codec_seconds += perf_counter() - self._lap
        self._bytes_out += size

    def end(self, code: Code) -> None:
        """The call is over; where it went well, `Call.outcome` is what counts."""
        endpoint, call = self._endpoint, self._call
        if code is Code.CANCELLED and (remaining := call.remaining) is not None and remaining < DEADLINE_SLACK:
            # gRPC ends both in the same way, and who gave up because it took too long is told so.
            code = Code.DEADLINE_EXCEEDED
        if call.runs_since:
            call.ended()  # The model has not said so: its caller has left before.
        code = code or call.outcome
        seconds = perf_counter() - self._started
        endpoint.in_flight -= 1
        endpoint.record(call, code, seconds, self._codec_seconds, self._bytes_in, self._bytes_out)
        if endpoint.access_log.on and not endpoint.internal:
            endpoint.access_log.line(endpoint.protocol, endpoint.entrypoint, endpoint.method, call, code, seconds)
