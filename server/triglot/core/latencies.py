"""How long the requests of one version took, as Triton's histogram and summaries have it (spec 6)."""

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
"""Upper limits of the buckets of times to the first response, in milliseconds, as Triton's."""
SUMMARY_LIMITS = tuple(1.02**power for power in range(1047))
"""From a microsecond to 16 minutes: the middle of a bucket is no more than 1 % off what is in it."""
SLOT_SECONDS, SLOTS = 12, 5
"""The window of a summary's quantiles: the last slots, of which one is not over yet, as in Triton."""
REQUEST, QUEUE, INPUT, INFER, OUTPUT = "request", "queue", "compute_input", "compute_infer", "compute_output"
CACHE_HIT, CACHE_MISS = "cache_hit", "cache_miss"


class Summary:
    """How many values there were, their sum, and quantiles of those of the last 48 to 60 s; in microseconds."""

    __slots__ = ("_slots", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._slots: deque[tuple[int, Histogram]] = deque(maxlen=SLOTS)

    def add(self, value: float, now: float) -> None:
        """One more value, at `now`, in seconds since the epoch."""
        self.count += 1
        self.sum += value
        slot = int(now // SLOT_SECONDS)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Histogram(SUMMARY_LIMITS)))
        self._slots[-1][1].add(value)

    def quantiles(self, shares: Sequence[float], now: float) -> list[float]:
        """The values that these shares of the window's do not exceed, within 1 % or a microsecond.

        NaN: there are none. May be asked on any thread.
        """
        slot = int(now // SLOT_SECONDS)
        window = Histogram(SUMMARY_LIMITS)
        for number, histogram in list(self._slots):
            if slot - SLOTS < number <= slot:
                window.merge(histogram)
        counts = list(accumulate(window.counts))
        return [_middle(bisect_left(counts, max(1, ceil(share * counts[-1])))) for share in shares]


def _middle(bucket: int) -> float:
    """Of a bucket of `SUMMARY_LIMITS`; NaN behind the last."""
    if bucket > len(SUMMARY_LIMITS):
        return nan
    if bucket == len(SUMMARY_LIMITS):
        return SUMMARY_LIMITS[-1]
    middle = sqrt(SUMMARY_LIMITS[bucket - 1] * SUMMARY_LIMITS[bucket]) if bucket else 0.5
    return float(f"{middle:.6g}")


class Latencies:
    """Of one version, from its load on.

    `first_response`: times from the request to the first response, in milliseconds, over these `buckets`; None
    without. `summaries` by what they are of; none without `quantiles`. `decoupled`: a request may have no
    response. `cached`: there is a response cache; as in Triton, the summaries are then of its hits and misses, and
    not of whole requests.
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
        """A request that took so many seconds in all has ended; `span`: its own, if it has one.

        An error is a response, too.
        """
        if self.first_response is None:
            return
        if times.responded:
            seconds -= perf_counter() - times.responded
        elif well and self._decoupled:
            return
        self.first_response.add(max(0.0, seconds) * 1e3, span, now)

    def succeeded(self, times: CallTimes, seconds: float, now: float) -> None:
        """A request went well, and took so many seconds in all."""
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
