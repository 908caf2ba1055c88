"""How far a call came, and how long each part of it took."""

from __future__ import annotations

import time


class CallTimes:
    """Of one call; whoever runs the model says when it has `started`, `waited` and `ended`.

    `queued`: it came into the queue at this instant of `time.perf_counter`; 0: it did not. `batch_size`: how many
    requests were executed together; 0: it was not executed. `rows`: how many inferences it was. Seconds that the
    request waited, was made the model's input, ran, and was made an answer. The model `began` at this instant of
    `time.perf_counter`, and `runs_since` then; 0: it does not run. `cache_hit`: what the response cache had, None
    where it was not asked. `responded`: when a stream had its first response; 0: it had none.
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
        """The model begins with so many requests; since `queued`, of `time.perf_counter`, this one has waited."""
        self.batch_size = batch_size
        self.runs_since = self.began = time.perf_counter()
        self.queue_seconds += self.runs_since - queued

    def waited(self, since: float) -> None:
        """From `since` until now it waited for its turn although it had started."""
        seconds = time.perf_counter() - since
        self.queue_seconds += seconds
        self.runs_since += seconds
        self.began += seconds

    def ended(self, joining: float = 0.0, splitting: float = 0.0) -> float:
        """The model has ended, or nobody waits for it any more; how many seconds it has run.

        Of the time since `started`, as much as `joining` went by before it, and `splitting` after it.
        """
        if not self.began:
            return 0.0
        seconds = time.perf_counter() - self.began - joining - splitting
        if self.runs_since:  # Else that has been said.
            self.runs_since = 0.0
            self.input_seconds += joining
            self.compute_seconds += seconds
            self.output_seconds += splitting
        return seconds
