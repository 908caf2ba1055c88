"""Latency distributions of one version: Triton's histogram and summaries (spec 6)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, nan, sqrt
from time import perf_counter

from triglot.core.call_times import CallTimes
from triglot.core.histogram import Histogram
from triglot.core.trace_context import Span

DEFAULT_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's upper limits of the buckets for the time to the first response, in milliseconds."""
SUMMARY_LIMITS = tuple(1.02**power for power in range(1047))
"""Upper bucket limits from a microsecond to 16 minutes: a bucket's middle is within 1 % of its values."""
SLOT_SECONDS, SLOTS = 12, 5
"""The window of a summary's quantiles: the latest slots, with the current, unfinished one, as in Triton."""
REQUEST, QUEUE, INPUT, INFER, OUTPUT = "request", "queue", "compute_input", "compute_infer", "compute_output"
CACHE_HIT, CACHE_MISS = "cache_hit", "cache_miss"


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
        whole = (CACHE_HIT, CACHE_MISS) if cached else (REQUEST,)
        names = (*whole, QUEUE, INPUT, INFER, OUTPUT) if quantiles else ()
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
