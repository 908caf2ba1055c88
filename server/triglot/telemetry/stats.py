"""What is kept of calls: by kind of call, by model, by protocol, and by second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from triglot.core.errors import Code
from triglot.telemetry.histogram import Histogram, rank
from triglot.telemetry.points import Points

ENDED = -1
"""Stands for the versions of a model that have ended and are not told apart any more."""
RECENT_SECONDS = 10
RECENT_CALLS = 1000
"""A model's recent calls: of so many seconds, and of their latencies at most so many."""


class Kind(NamedTuple):
    """What the calls of an endpoint are told apart by; version 0: no version was found, or `ENDED`."""

    model: str
    version: int
    code: Code


class CallStats:
    """The calls of one kind. Times are in microseconds.

    `queue`, `compute` and `batches` (how many calls were executed in a batch of each size) are of the calls that
    were executed; None before the first. `codec` is None where nothing is inferred. `used`: the time of the last
    call, in seconds since the epoch.
    """

    __slots__ = ("batches", "bytes_in", "bytes_out", "codec", "compute", "latency", "model", "queue", "used")

    def __init__(self, model: ModelStats, *, inference: bool) -> None:
        self.model = model
        self.latency = Histogram()
        self.codec = Histogram() if inference else None
        self.queue: Histogram | None = None
        self.compute: Histogram | None = None
        self.batches: dict[int, int] = {}
        self.bytes_in = self.bytes_out = 0
        self.used = 0.0

    def executed(self, size: int, queue_seconds: float, compute_seconds: float) -> None:
        """One call was executed, in a batch of `size`."""
        if self.queue is None or self.compute is None:
            self.queue, self.compute = Histogram(), Histogram()
        self.queue.add(queue_seconds * 1e6)
        self.compute.add(compute_seconds * 1e6)
        self.batches[size] = self.batches.get(size, 0) + 1

    def merge(self, other: CallStats) -> None:
        """Take in the calls of another one of the same endpoint."""
        self.latency.merge(other.latency)
        if self.codec is not None and other.codec is not None:
            self.codec.merge(other.codec)
        if other.queue is not None and other.compute is not None:
            if self.queue is None or self.compute is None:
                self.queue, self.compute = Histogram(), Histogram()
            self.queue.merge(other.queue)
            self.compute.merge(other.compute)
        for size, count in other.batches.items():
            self.batches[size] = self.batches.get(size, 0) + count
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.used = max(self.used, other.used)


class Traffic:
    """Inference calls since the start: those that ended, failed, and were executed, and the executions."""

    __slots__ = ("executed", "executions", "failures", "requests")

    def __init__(self) -> None:
        self.requests = self.failures = self.executed = 0
        self.executions = 0.0

    def sums(self) -> tuple[int, int, int, float]:
        """Requests, failures, executed, executions."""
        return self.requests, self.failures, self.executed, self.executions

    def merge(self, other: Traffic) -> None:
        """Take in the calls of another one."""
        self.requests += other.requests
        self.failures += other.failures
        self.executed += other.executed
        self.executions += other.executions


class ModelStats(Traffic):
    """The inference calls of one version of a model. `used` as in `CallStats`."""

    __slots__ = ("_ends", "latencies", "used")

    def __init__(self) -> None:
        super().__init__()
        self.used = 0.0
        self.latencies: deque[float] = deque(maxlen=RECENT_CALLS)
        """Seconds, the newest last."""
        self._ends = deque([self.sums()], RECENT_SECONDS + 1)

    def end_second(self) -> None:
        """A second has passed."""
        self._ends.append(self.sums())

    def merge(self, other: Traffic) -> None:
        """Take in the calls of another one, as calls of long ago."""
        super().merge(other)
        self._ends = deque([self.sums()], RECENT_SECONDS + 1)

    @property
    def request_rate(self) -> float:
        """Recent calls per second."""
        passed = len(self._ends) - 1
        return (self._ends[-1][0] - self._ends[0][0]) / passed if passed else 0.0

    @property
    def recent_executions(self) -> tuple[int, float]:
        """Recent calls that were executed, and their executions."""
        before = self._ends[0]
        return self.executed - before[2], self.executions - before[3]

    @property
    def mean_batch_size(self) -> float | None:
        """Of the recent executions; None if there are none."""
        executed, executions = self.recent_executions
        return executed / executions if executions > 0 else None

    def recent_latencies(self) -> list[float]:
        """Of the recent calls, in seconds, ascending."""
        recent = self.requests - self._ends[0][0]
        return sorted(list(self.latencies)[-recent:]) if recent else []


@dataclass(frozen=True, slots=True)
class Second:
    """One second of all inference calls: requests that ended by protocol, and those that failed.

    Latencies and the longest lag of the event loop are in milliseconds. `queue_depth` and `in_flight` are at its
    end. None: nothing to measure. `points`: of the latencies in seconds, where other workers have some, too.
    """

    requests: dict[str, int]
    failures: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    queue_depth: int = 0
    in_flight: int = 0
    mean_batch_size: float | None = None
    loop_lag: float | None = None
    points: Points = field(default_factory=list)


def milliseconds(ordered: list[float], share: int) -> float | None:
    """What `share` ten-thousandths of ascending seconds do not exceed."""
    return rank(ordered, share) * 1e3 if ordered else None
