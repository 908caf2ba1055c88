"""The page's document for several workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triglot.protocols.monitor.overview import SHARES, Document, collect, finished, milliseconds
from triglot.repository.manager.plan import Version
from triglot.telemetry.added_series import added_value, series_report
from triglot.telemetry.calls import Second
from triglot.telemetry.points import points_of, together
from triglot.telemetry.store import Telemetry

ADDED = (
    "queue_depth",
    "in_flight",
    "requests",
    "failures",
    "request_rate",
    "waited",
    "queue",
    "compute",
    "executed",
    "executions",
)
"""Keys of a version's row whose values are summed."""


def overview_report(telemetry: Telemetry, versions: Sequence[Version]) -> Document:
    """Returns this process's counts as JSON values. May run on another thread."""
    report = collect(telemetry, versions)
    for row in report["models"]:
        row["latencies"] = points_of([seconds for seconds, _ in row["latencies"]])
    report["metrics"] = {name: series_report(telemetry.metrics, name) for name in list(telemetry.metrics.by_name)}
    report["history"] = [
        [one.requests, one.failures, one.points, one.queue_depth, one.in_flight, one.mean_batch_size, one.loop_lag]
        for one in list(telemetry.history)
    ]
    return report


def added_overview(reports: Sequence[Document]) -> Document:
    """Returns what `overview` does, for all workers together."""
    protocols: Document = {}
    for report in reports:
        for protocol, counts in report["protocols"].items():
            protocols[protocol] = _sums(protocols.get(protocol, {}), counts)
    totals: Document = {}
    for report in reports:
        totals = _sums(totals, report["totals"])
    names = dict.fromkeys(name for report in reports for name in report["metrics"])
    values = {name: added_value(name, [report["metrics"].get(name) for report in reports]) for name in names}
    counted = {"totals": totals, "protocols": protocols, "models": _rows(reports)}
    return finished(counted, values, _seconds([report["history"] for report in reports]))


def _sums(total: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {
        key: total.get(key, 0) + other.get(key, 0) for key in (*total, *(key for key in other if key not in total))
    }


def _rows(reports: Sequence[Document]) -> list[Document]:
    rows: dict[tuple[str, int], Document] = {}
    for report in reports:
        for row in report["models"]:
            key = row["name"], row["version"]
            total = rows.get(key)
            rows[key] = row if total is None else _row(total, row)
    return [rows[key] for key in sorted(rows)]


def _row(total: Document, other: Document) -> Document:
    """Merge rows of a version; its state is that of a worker where it is not ready, if total is one."""
    worse = other if total["ready"] and not other["ready"] else total
    return {
        **worse,
        **{key: total[key] + other[key] for key in ADDED},
        "platform": total["platform"] or other["platform"],
        "protocols": _sums(total["protocols"], other["protocols"]),
        "latencies": together([total["latencies"], other["latencies"]]),
        "last_inference": max(total["last_inference"], other["last_inference"]),
    }


def _seconds(histories: Sequence[Sequence[Any]]) -> list[Second]:
    """Merge histories by their ends; a worker with a shorter history counts as idle before it."""
    longest = max(map(len, histories), default=0)
    padded = [[None] * (longest - len(history)) + list(history) for history in histories]
    return [_second([one for one in ones if one is not None]) for ones in zip(*padded, strict=True)]


def _second(ones: Sequence[Any]) -> Second:
    requests: dict[str, int] = {}
    failures = queue_depth = in_flight = 0
    executed = executions = 0.0
    lags = []
    for its, failed, _, waiting, running, size, lag in ones:
        for protocol, count in its.items():
            requests[protocol] = requests.get(protocol, 0) + count
        failures, queue_depth, in_flight = failures + failed, queue_depth + waiting, in_flight + running
        if size is not None:
            # Counts finished calls, nearly all of which were executed.
            executed += sum(its.values())
            executions += sum(its.values()) / size
        if lag is not None:
            lags.append(lag)
    points = together(one[2] for one in ones)
    p50, p90, p99 = (milliseconds(points, share) for share in SHARES.values())
    return Second(
        requests,
        failures,
        p50=p50,
        p90=p90,
        p99=p99,
        queue_depth=queue_depth,
        in_flight=in_flight,
        mean_batch_size=executed / executions if executions else None,
        loop_lag=max(lags, default=None),
    )
