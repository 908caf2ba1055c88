"""`CallTimes`: how far a call got, how long each stage took, and how many bytes it had."""

from __future__ import annotations

import time


class CallTimes:
    """Times and sizes of one call, from its first byte to its last: what telemetry reads of a `Call`.

    Its transport calls `received`, `decoded`, `answered`, `encoded` and `sent`; what runs the model calls
    `execution_started`, `execution_waited` and `execution_ended`.

    `arrived` and `lap`: the `time.perf_counter` instants at which it began, and its decoding or encoding did.
    `codec_seconds`: how long these took. `bytes_in`, `bytes_out`: bytes received and sent so far.

    `queued`: the `time.perf_counter` instant at which it was queued; 0: it was not. `batch_size`: how many
    requests were executed together; 0: it was not executed. `rows`: how many inferences it was. `queue_seconds`,
    `input_seconds`, `compute_seconds` and `output_seconds`: time in the queue, for making the model's input, in
    the model, and for making the response. `began`: the `time.perf_counter` instant at which the model started;
    `runs_since`: the same while it runs, else 0. `cache_hit`: the result of the response cache's lookup, None
    without one. `responded`: when a stream sent its first response; 0: it sent none.
    """

    __slots__ = (
        "arrived",
        "batch_size",
        "began",
        "bytes_in",
        "bytes_out",
        "cache_hit",
        "cache_seconds",
        "codec_seconds",
        "compute_seconds",
        "input_seconds",
        "lap",
        "output_seconds",
        "queue_seconds",
        "queued",
        "responded",
        "rows",
        "runs_since",
    )

    def __init__(self) -> None:
        self.arrived = self.lap = self.codec_seconds = 0.0
        self.bytes_in = self.bytes_out = 0
        self.batch_size = self.rows = 0
        self.queued = self.queue_seconds = self.input_seconds = self.compute_seconds = self.output_seconds = 0.0
        self.cache_hit: bool | None = None
        self.cache_seconds = 0.0
        self.began = self.runs_since = self.responded = 0.0

    def received(self, size: int) -> None:
        """Note that a body of `size` bytes has arrived; decoding begins."""
        self.bytes_in += size
        self.lap = time.perf_counter()

    def decoded(self) -> None:
        """Note that decoding, which began at the start or at `received`, has ended."""
        self.codec_seconds += time.perf_counter() - self.lap

    def answered(self) -> None:
        """Note that there is a response; encoding begins."""
        self.lap = time.perf_counter()

    def encoded(self, size: int) -> None:
        """Note that the response has been encoded into `size` bytes since `answered`."""
        self.codec_seconds += time.perf_counter() - self.lap
        self.bytes_out += size

    def sent(self, size: int) -> None:
        """Note that `size` bytes of a stream's response are being sent; their encoding time is not measured."""
        self.bytes_out += size

    def execution_started(self, queued: float, batch_size: int = 1) -> None:
        """Record the model's start with `batch_size` requests; `queued` is when this one was (`perf_counter`)."""
        self.batch_size = batch_size
        self.runs_since = self.began = time.perf_counter()
        self.queue_seconds += self.runs_since - queued

    def execution_waited(self, since: float) -> None:
        """Count the time from `since` until now as queue time, although the call had started."""
        seconds = time.perf_counter() - since
        self.queue_seconds += seconds
        self.runs_since += seconds
        self.began += seconds

    def execution_ended(self, joining: float = 0.0, splitting: float = 0.0) -> float:
        """Record the end, of the model or by cancellation; returns the seconds that the model ran.

        Of the time since `execution_started`, `joining` seconds went into making the input, and `splitting` into
        the output.
        """
        if not self.began:
            return 0.0
        seconds = time.perf_counter() - self.began - joining - splitting
        if self.runs_since:  # Else the end was already recorded.
            self.runs_since = 0.0
            self.input_seconds += joining
            self.compute_seconds += seconds
            self.output_seconds += splitting
        return seconds
