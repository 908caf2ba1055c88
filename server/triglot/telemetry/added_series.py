"""Merges the metric series of several workers into those of one server (grps 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triglot.telemetry.points import point, points_of, together
from triglot.telemetry.series import CDF_SHARES, Distribution, Metrics, Trend

ADDED = ("*cpu_usage(%)", "*mem_usage(%)")
"""Metrics of a process whose sum over the workers is the server's value."""
BY_REQUESTS = ("*fail_rate(%)", "*latency_avg(ms)")
"""Averages over requests: workers are weighted by their number of requests."""
REQUESTS = "*qps"


def series_report(metrics: Metrics, name: str) -> dict[str, Any] | None:
    """Returns a metric of this process as JSON values; None if it does not exist."""
    metric = metrics.by_name.get(name)
    if metric is None:
        return None
    report: dict[str, Any] = {"aggregation": metric.aggregation, "value": metric.value}
    if isinstance(metric, Distribution):
        return report | {"points": points_of(metric.ordered)}
    requests = metrics.by_name[REQUESTS]
    assert isinstance(requests, Trend)  # It is built in.
    return report | {"values": metric.points(), "requests": requests.points() if name in BY_REQUESTS else []}


def added_series(name: str, reports: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the merged series in the form of its page; None if no worker has it.

    Workers whose aggregation differs from that of the first are ignored.
    """
    known = _comparable(reports)
    if not known:
        return None
    if known[0]["aggregation"] == "cdf":
        points = together(report["points"] for report in known)
        return {
            "label": "cdf",
            "data": [[x, round(point(points, share) or 0.0, 2)] for x, share in CDF_SHARES.items()],
        }
    aggregation = known[0]["aggregation"]
    data = []
    for at, values in enumerate(zip(*(report["values"] for report in known), strict=True)):
        requests = [report["requests"][at] or 0.0 for report in known if report["requests"]]
        data.append([at, round(_merged(name, aggregation, values, requests) or 0.0, 2)])
    return {"label": "trend", "data": data}


def added_value(name: str, reports: Sequence[Mapping[str, Any] | None]) -> float | None:
    """Returns the value of the last second, merged; None without a worker that has one."""
    known = _comparable(reports)
    if not known:
        return None
    if known[0]["aggregation"] == "cdf":
        return point(together(report["points"] for report in known), 9900)
    requests = [report["requests"][-1] or 0.0 for report in known if report["requests"]]
    return _merged(name, known[0]["aggregation"], [report["value"] for report in known], requests)


def _comparable(reports: Sequence[Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    known = [report for report in reports if report is not None]
    return [report for report in known if report["aggregation"] == known[0]["aggregation"]]


def _merged(
    name: str, aggregation: str, values: Sequence[float | None], requests: Sequence[float]
) -> float | None:
    """Merges one value per worker; a mean is a mean of means, weighted by `requests` if there are any."""
    weights = requests if len(requests) == len(values) and any(requests) else [1.0] * len(values)
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    if not known:
        return None
    numbers = [value for value, _ in known]
    if aggregation == "inc" or name in ADDED:
        return sum(numbers)
    if aggregation in ("max", "min"):
        return max(numbers) if aggregation == "max" else min(numbers)
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else None
