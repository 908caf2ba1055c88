"""What is measured: the times of a call, and what is counted of all calls of a loaded version (spec 5.9).

`CallTimes` of a call that ended go into the `Statistics` of its model's version; `Latencies` are kept where more
than counts and sums is wanted. A `Reading` is a metric of its own, which a part of the server reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, nan, sqrt
from time import perf_counter
from types import MappingProxyType
from typing import Final

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import Code
from triglot.core.tensor import Array
from triglot.core.trace_context import Span

MAX_RESPONSES: Final = 1000
"""Responses of a stream that are counted by their index; further ones are counted with this index."""
REJECTED: Final = "REJECTED"
CANCELED: Final = "CANCELED"
BACKEND: Final = "BACKEND"
OTHER: Final = "OTHER"
REASONS: Final = (REJECTED, CANCELED, BACKEND, OTHER)
"""Reasons of failed requests, in Triton's terms (spec 6)."""
_CANCELLED_CODES: Final = (Code.CANCELLED, Code.DEADLINE_EXCEEDED)
_REJECTED_CODES: Final = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE)


@mypyc_attr(allow_interpreted_subclasses=True)
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
        self.lap = perf_counter()

    def decoded(self) -> None:
        """Note that decoding, which began at the start or at `received`, has ended."""
        self.codec_seconds += perf_counter() - self.lap

    def answered(self) -> None:
        """Note that there is a response; encoding begins."""
        self.lap = perf_counter()

    def encoded(self, size: int) -> None:
        """Note that the response has been encoded into `size` bytes since `answered`."""
        self.codec_seconds += perf_counter() - self.lap
        self.bytes_out += size

    def sent(self, size: int) -> None:
        """Note that `size` bytes of a stream's response are being sent; their encoding time is not measured."""
        self.bytes_out += size

    def execution_started(self, queued: float, batch_size: int = 1) -> None:
        """Record the model's start with `batch_size` requests; `queued` is when this one was (`perf_counter`)."""
        self.batch_size = batch_size
        self.runs_since = self.began = perf_counter()
        self.queue_seconds += self.runs_since - queued

    def execution_waited(self, since: float) -> None:
        """Count the time from `since` until now as queue time, although the call had started."""
        seconds = perf_counter() - since
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
        seconds = perf_counter() - self.began - joining - splitting
        if self.runs_since:  # Else the end was already recorded.
            self.runs_since = 0.0
            self.input_seconds += joining
            self.compute_seconds += seconds
            self.output_seconds += splitting
        return seconds


# --- distributions ---

LATENCY_LIMITS: Final = tuple(10 * 1.8**power for power in range(33))
"""Upper limits of the buckets for durations, in microseconds (tfs 4.7)."""


Exemplar = tuple[float, float, Span]
"""When a value came, in seconds since the epoch; the value; the span of its call."""


class Histogram:
    """Counts of values by bucket, and their sum. The default limits are for times in microseconds.

    `exemplars` holds the latest value of a sampled call for each bucket, or None. It is None until the first one.
    """

    __slots__ = ("counts", "exemplars", "limits", "sum")

    def __init__(self, limits: Sequence[float] = LATENCY_LIMITS) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0
        self.exemplars: list[Exemplar | None] | None = None

    def add(self, value: float, span: Span | None = None, now: float = 0.0) -> None:
        """Add one value. With the `span` of its call it becomes the bucket's exemplar, of the time `now`."""
        bucket = bisect_left(self.limits, value)
        self.counts[bucket] += 1
        self.sum += value
        if span is not None:
            if self.exemplars is None:
                self.exemplars = [None] * len(self.counts)
            self.exemplars[bucket] = (now, value, span)

    def add_many(self, value: float, count: int) -> None:
        """Add the same value `count` times."""
        self.counts[bisect_left(self.limits, value)] += count
        self.sum += value * count

    def merge(self, other: Histogram) -> None:
        """Add the values of another histogram with the same limits."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        if other.exemplars is not None:
            mine = self.exemplars or [None] * len(self.counts)
            self.exemplars = [latest(pair) for pair in zip(mine, other.exemplars, strict=True)]

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


def latest(exemplars: Iterable[Exemplar | None]) -> Exemplar | None:
    """Return the latest exemplar, or None if there is none."""
    return max(
        (exemplar for exemplar in exemplars if exemplar is not None),
        key=lambda exemplar: exemplar[0],
        default=None,
    )


def rank(ordered: Sequence[float], share: int) -> float:
    """Return the quantile `share`, in ten-thousandths, of ascending values, of which there is at least one."""
    return ordered[max(0, -(-len(ordered) * share // 10_000) - 1)]


DEFAULT_BUCKETS: Final = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's upper limits of the buckets for the time to the first response, in milliseconds."""
SUMMARY_LIMITS: Final = tuple(1.02**power for power in range(1047))
"""Upper bucket limits from a microsecond to 16 minutes: a bucket's middle is within 1 % of its values."""
SLOT_SECONDS: Final = 12
SLOTS: Final = 5
"""The window of a summary's quantiles: the latest slots, with the current, unfinished one, as in Triton."""
REQUEST: Final = "request"
QUEUE: Final = "queue"
INPUT: Final = "compute_input"
INFER: Final = "compute_infer"
OUTPUT: Final = "compute_output"
CACHE_HIT: Final = "cache_hit"
CACHE_MISS: Final = "cache_miss"


class Summary:
    """Count and sum of all values, and quantiles of those of the last 48 to 60 s; in microseconds."""

    __slots__ = ("_slots", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._slots: deque[tuple[int, Histogram]] = deque(maxlen=SLOTS)

    def add(self, value: float, now: float) -> None:
        """Add a value at `now`, in seconds since the epoch."""
        self.count += 1
        self.sum += value
        slot = int(now // SLOT_SECONDS)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Histogram(SUMMARY_LIMITS)))
        self._slots[-1][1].add(value)

    def quantiles(self, shares: Sequence[float], now: float) -> list[float]:
        """Return the quantiles of the window for these shares, within 1 % or a microsecond.

        NaN if the window is empty. May be called on any thread.
        """
        slot = int(now // SLOT_SECONDS)
        window = Histogram(SUMMARY_LIMITS)
        for number, histogram in list(self._slots):
            if slot - SLOTS < number <= slot:
                window.merge(histogram)
        counts = list(accumulate(window.counts))
        return [_middle(bisect_left(counts, max(1, ceil(share * counts[-1])))) for share in shares]


def _middle(bucket: int) -> float:
    """Return the middle of a bucket of `SUMMARY_LIMITS`; NaN beyond the last."""
    if bucket > len(SUMMARY_LIMITS):
        return nan
    if bucket == len(SUMMARY_LIMITS):
        return SUMMARY_LIMITS[-1]
    middle = sqrt(SUMMARY_LIMITS[bucket - 1] * SUMMARY_LIMITS[bucket]) if bucket else 0.5
    return float(f"{middle:.6g}")


class Latencies:
    """Latencies of one version since its load.

    `first_response`: a histogram with these `buckets` of the times from request to first response, in
    milliseconds; None without buckets. `summaries` by stage; none without `quantiles`. `decoupled`: a request may
    have no response. `cached`: there is a response cache; as in Triton, the summaries are then those of its hits
    and misses instead of whole requests.
    """

    __slots__ = ("_decoupled", "first_response", "quantiles", "summaries")

    def __init__(
        self, buckets: Sequence[float] | None, quantiles: Sequence[float], *, decoupled: bool, cached: bool
    ) -> None:
        self._decoupled = decoupled
        self.first_response = None if buckets is None else Histogram(buckets)
        self.quantiles = quantiles
        totals = (CACHE_HIT, CACHE_MISS) if cached else (REQUEST,)
        names = (*totals, QUEUE, INPUT, INFER, OUTPUT) if quantiles else ()
        self.summaries = {name: Summary() for name in names}

    def responded(self, times: CallTimes, seconds: float, now: float, span: Span | None, *, well: bool) -> None:
        """Add a request that ended after `seconds` in total; `span` is its own, if it has one.

        An error counts as a response, too.
        """
        if self.first_response is None:
            return
        if times.responded:
            seconds -= perf_counter() - times.responded
        elif well and self._decoupled:
            return
        self.first_response.add(max(0.0, seconds) * 1e3, span, now)

    def succeeded(self, times: CallTimes, seconds: float, now: float) -> None:
        """Add a successful request that took `seconds` in total."""
        if not self.summaries:
            return
        parts = {REQUEST: seconds, QUEUE: times.queue_seconds}
        if times.cache_hit is not None:
            parts[CACHE_HIT if times.cache_hit else CACHE_MISS] = times.cache_seconds
        if not times.cache_hit:
            parts |= {INPUT: times.input_seconds, INFER: times.compute_seconds, OUTPUT: times.output_seconds}
        for name, part in parts.items():
            if (summary := self.summaries.get(name)) is not None:
                summary.add(max(0.0, part) * 1e6, now)


# --- counters of a version ---


class Duration:
    """A count of events and their total time in seconds."""

    __slots__ = ("count", "seconds")

    def __init__(self, count: int = 0, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def add(self, seconds: float) -> None:
        """Count one event."""
        self.count += 1
        self.seconds += seconds


class Executions:
    """Executions with the same batch size."""

    __slots__ = ("count", "infer_seconds", "input_seconds", "output_seconds")

    def __init__(self) -> None:
        self.count = 0
        self.input_seconds = self.infer_seconds = self.output_seconds = 0.0


class Responses:
    """Responses with the same index, over all calls of a decoupled model."""

    __slots__ = ("cancel", "empty_response", "fail", "infer", "output", "success")

    def __init__(self) -> None:
        self.infer = Duration()
        self.output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()


class Statistics:
    """Statistics of one version from its load to its end: a version that is loaded again starts at zero.

    Telemetry counts requests when they end, the server counts executions when the model has ended, both on the
    event loop; may be read on any thread. Times are in seconds, and are those of successful requests. `batched`:
    the first dim of the inputs is the batch. `composed`: other models do the work (an ensemble).
    """

    __slots__ = (
        "_batched",
        "_composed",
        "batches",
        "execution_count",
        "fail",
        "failures",
        "hit",
        "infer_seconds",
        "inference_count",
        "input_seconds",
        "last_inference",
        "latencies",
        "miss",
        "output_seconds",
        "queue_seconds",
        "responses",
        "success",
    )

    def __init__(self, *, batched: bool = False, composed: bool = False) -> None:
        self._batched = batched
        self._composed = composed
        self.last_inference = 0.0
        """Seconds since the epoch."""
        self.inference_count = self.execution_count = 0
        self.success, self.fail, self.hit, self.miss = Duration(), Duration(), Duration(), Duration()
        self.queue_seconds = self.input_seconds = self.infer_seconds = self.output_seconds = 0.0
        self.failures = dict.fromkeys(REASONS, 0)
        self.batches: dict[int, Executions] = {}
        """Executions by their number of rows."""
        self.responses: dict[int, Responses] = {}
        """Responses by index; for decoupled models."""
        self.latencies: Latencies | None = None
        """Distributions, where more than sums is kept."""

    @property
    def queue(self) -> Duration:
        """Time from the queue to the execution; includes requests answered from the response cache."""
        return Duration(self.success.count, self.queue_seconds)

    @property
    def computed(self) -> int:
        """Successful requests that the response cache did not answer."""
        return self.success.count - self.hit.count

    def rows(self, inputs: Mapping[str, Array]) -> int:
        """Return how many inferences an execution with these inputs is."""
        if self._batched:
            for array in inputs.values():
                return array.shape[0] if array.ndim else 1
        return 1

    def executed(self, rows: int, infer: float, joining: float = 0.0, splitting: float = 0.0) -> None:
        """Count an execution that ended, successfully or not."""
        self.execution_count += 1
        executions = self.batches.get(rows)
        if executions is None:
            executions = self.batches[rows] = Executions()
        executions.count += 1
        executions.input_seconds += joining
        executions.infer_seconds += infer
        executions.output_seconds += splitting

    def executed_unbatched(self, times: CallTimes, inputs: Mapping[str, Array], seconds: float) -> None:
        """Count the execution of a single request, successful or not, if it started."""
        if times.batch_size:
            rows = self.rows(inputs)
            times.rows += rows
            self.executed(rows, seconds)

    def on_end(self, times: CallTimes, code: Code, seconds: float, now: float, span: Span | None = None) -> None:
        """Count a request that ended at `now`, in seconds since the epoch; `span` is its own, if it has one."""
        if code is not Code.OK:
            self._failed(times, code, seconds, now, span)
            return
        if self.latencies is not None:
            self.latencies.responded(times, seconds, now, span, well=True)
            self.latencies.succeeded(times, seconds, now)
        self.last_inference = now
        self.success.add(seconds)
        self.queue_seconds += times.queue_seconds
        if times.cache_hit is not None:
            (self.hit if times.cache_hit else self.miss).add(times.cache_seconds)
            if times.cache_hit:
                return
        self.inference_count += times.rows
        self.input_seconds += times.input_seconds
        self.infer_seconds += times.compute_seconds
        self.output_seconds += times.output_seconds

    def _failed(self, times: CallTimes, code: Code, seconds: float, now: float, span: Span | None) -> None:
        """Count a failed request. One that was invalid, or found the queue full, is no failed inference."""
        if not (times.batch_size or times.queued or code in _CANCELLED_CODES):
            self.failures[REJECTED] += code in _REJECTED_CODES
            return
        self.last_inference = now
        self.fail.add(seconds)
        if self.latencies is not None:
            self.latencies.responded(times, seconds, now, span, well=False)
        self.failures[self._reason(times, code)] += 1

    def _reason(self, times: CallTimes, code: Code) -> str:
        if code is Code.CANCELLED:
            return CANCELED
        if not times.batch_size:
            return REJECTED  # Its queue timeout expired.
        if code is Code.DEADLINE_EXCEEDED:
            return CANCELED
        return OTHER if self._composed else BACKEND

    def response(self, index: int) -> Responses:
        """Return the counters of the responses with this index."""
        index = min(index, MAX_RESPONSES)
        responses = self.responses.get(index)
        if responses is None:
            responses = self.responses[index] = Responses()
        return responses


# --- metrics of parts of the server ---

NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one metric of one version of a model.

    `name` is without the server's prefix and, for a `counter` (it only grows), without `_total`; in base units.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    counter: bool = False


class BatchCounts:
    """Counts of the batches that a schedule forms. Written by one thread at a time, readable on any."""

    def __init__(self) -> None:
        self._closed: dict[str, int] = {}
        self._requests = 0
        self._rows = 0

    def add(self, reason: str, requests: int, rows: int) -> None:
        """Count a batch that was closed for this reason."""
        self._closed[reason] = self._closed.get(reason, 0) + 1
        self._requests += requests
        self._rows += rows

    def readings(self, labels: Mapping[str, str] = NO_LABELS) -> Iterator[Reading]:
        """Yield the counts of batches by the reason for closing them, and of requests, with these labels."""
        for reason, count in list(self._closed.items()):
            text = "Batches, by the reason why they were closed."
            yield Reading("batches_closed", text, count, {**labels, "reason": reason}, counter=True)
        text = "Requests executed in batches."
        yield Reading("batched_requests", text, self._requests, labels, counter=True)
        yield Reading("batched_rows", "Rows executed in batches.", self._rows, labels, counter=True)
