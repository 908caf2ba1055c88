"""`CallTimes`: how far a call got, and how long each stage took."""

from __future__ import annotations

import time


class CallTimes:
    """Times of one call; what runs the model calls `started`, `waited` and `ended`.

    `queued`: the `time.perf_counter` instant at which it was queued; 0: it was not. `batch_size`: how many
    requests were executed together; 0: it was not executed. `rows`: how many inferences it was. `queue_seconds`,
    `input_seconds`, `compute_seconds` and `output_seconds`: time in the queue, for making the model's input, in
    the model, and for making the response. `began`: the `time.perf_counter` instant at which the model started;
    `runs_since`: the same while it runs, else 0. `cache_hit`: the result of the response cache's lookup, None
    without one. `responded`: when a stream sent its first response; 0: it sent none.
    """

    __slots__ = (
        "batch_size",
        "began",
        "cache_hit",
        "cache_seconds",
        "compute_seconds",
        "input_seconds",
        "output_seconds",
        "queue_seconds",
        "queued",
        "responded",
        "rows",
        "runs_since",
    )

    def __init__(self) -> None:
        self.batch_size = self.rows = 0
        self.queued = self.queue_seconds = self.input_seconds = self.compute_seconds = self.output_seconds = 0.0
        self.cache_hit: bool | None = None
        self.cache_seconds = 0.0
        self.began = self.runs_since = self.responded = 0.0

    def started(self, queued: float, batch_size: int = 1) -> None:
        """Record the model's start with `batch_size` requests; `queued` is when this one was (`perf_counter`)."""
        self.batch_size = batch_size
        self.runs_since = self.began = time.perf_counter()
        self.queue_seconds += self.runs_since - queued

    def waited(self, since: float) -> None:
        """Count the time from `since` until now as queue time, although the call had started."""
        seconds = time.perf_counter() - since
        self.queue_seconds += seconds
        self.runs_since += seconds
        self.began += seconds

    def ended(self, joining: float = 0.0, splitting: float = 0.0) -> float:
        """Record the end, of the model or by cancellation; returns the seconds that the model ran.

        Of the time since `started`, `joining` seconds went into making the input, and `splitting` into the output.
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
