"""What each version of a model did, as numbers that can be added up over workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triglot.core.errors import Code
from triglot.core.statistics import LATENCY_LIMITS, Histogram
from triglot.telemetry.store import Telemetry

SHADOW = "SHADOW"
"""Entry point of copies in telemetry."""
FAULTS = frozenset(
    (
        Code.UNKNOWN,
        Code.DEADLINE_EXCEEDED,
        Code.RESOURCE_EXHAUSTED,
        Code.ABORTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    )
)
"""Codes of calls that failed through no fault of the client."""
Counts = dict[str, Any]


def calls_of(telemetry: Telemetry, name: str) -> dict[int, Counts]:
    """Return `requests`, `errors` and `latency` of each version since the start, without copies."""
    found: dict[int, Counts] = {}
    for endpoint, kind, stats in telemetry.calls():
        if kind.model == name and kind.version > 0 and endpoint.inference and endpoint.entrypoint != SHADOW:
            counts = found.setdefault(kind.version, {"requests": 0, "errors": 0, "latency": {}})
            buckets = buckets_of(stats.latency)
            requests = sum(buckets.values())
            counts["requests"] += requests
            counts["errors"] += requests if kind.code in FAULTS else 0
            for bucket, count in buckets.items():
                counts["latency"][bucket] = counts["latency"].get(bucket, 0) + count
    return found


def buckets_of(latency: Histogram) -> dict[str, int]:
    """Return the counts of a histogram's buckets that have any, by their number."""
    return {str(bucket): count for bucket, count in enumerate(latency.counts) if count}


def quantile_ms(buckets: Mapping[str, int], share: float) -> float | None:
    """Return a quantile of a latency in milliseconds, within its bucket by interpolation; None without values."""
    needed = share * sum(buckets.values())
    for bucket, count in sorted((int(bucket), count) for bucket, count in buckets.items()):
        if needed <= count:
            low, high = (LATENCY_LIMITS[max(0, min(at, len(LATENCY_LIMITS) - 1))] for at in (bucket - 1, bucket))
            return float(f"{(low + (high - low) * needed / count) / 1e3:.3g}")
        needed -= count
    return None
