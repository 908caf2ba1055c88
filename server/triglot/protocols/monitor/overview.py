"""The page's document: the models, the totals and the last minutes.

Strategy: each process reports numbers that can be merged, and the document is made of the merged ones, whether of
one process or of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from triglot.repository.manager.plan import Version
from triglot.telemetry.calls import CallStats, ModelStats, Second
from triglot.telemetry.merging import Rule, merged, values_by_key
from triglot.telemetry.points import Points, point, points_of, together
from triglot.telemetry.series import merged_value, series_report
from triglot.telemetry.store import Telemetry

SHARES = {"p50": 5000, "p90": 9000, "p99": 9900}
Document = dict[str, Any]


def _worst(states: list[Document]) -> Document:
    """Return the first state that is not ready, if there is one."""
    return next((state for state in states if not state["ready"]), states[0])


VERSION_RULES: Mapping[str, Rule] = {
    "state": _worst,
    "platform": lambda names: next(filter(None, names), ""),
    "latencies": together,
    "last_inference": max,
}
SECOND_RULES: Mapping[str, Rule] = {"latencies": together, "loop_lag": max}


def printable(name: str) -> str:
    """Replace lone surrogates, which may be in clients' and files' names but not in UTF-8."""
    return name.encode(errors="replace").decode()


def overview_report(telemetry: Telemetry, versions: Sequence[Version]) -> Document:
    """Return this process's numbers as JSON values. May run on another thread."""
    traffic = telemetry.traffic()
    return {
        "totals": {
            "requests": sum(counts.requests for counts in traffic.values()),
            "failures": sum(counts.failures for counts in traffic.values()),
            "in_flight": telemetry.in_flight,
            "queue_depth": sum(
                version.servable.queue_depth for version in versions if version.servable is not None
            ),
        },
        "protocols": {
            protocol: {"requests": counts.requests, "failures": counts.failures}
            for protocol, counts in traffic.items()
        },
        "models": _models(telemetry, versions),
        "metrics": {
            name: series_report(telemetry.metrics, name, last=True) for name in list(telemetry.metrics.by_name)
        },
        "history": [_second(second) for second in list(telemetry.history)],
    }


def overview(reports: Sequence[Document]) -> Document:
    """Return the document without the server's part. Numbers are None if nothing was measured."""
    protocols = merged([report["protocols"] for report in reports], {})
    metrics = values_by_key(report["metrics"] for report in reports)
    models = values_by_key(report["models"] for report in reports)
    return {
        "metrics": [
            {"name": printable(name), "value": _rounded(merged_value(found))} for name, found in metrics.items()
        ],
        "totals": merged([report["totals"] for report in reports], {}),
        "protocols": protocols,
        "models": [
            _row(name, int(version), merged(rows, VERSION_RULES))
            for name, found in sorted(models.items())
            for version, rows in sorted(values_by_key(found).items(), key=lambda item: int(item[0]))
        ],
        "history": _history(list(protocols), _seconds([report["history"] for report in reports])),
    }


def _models(telemetry: Telemetry, versions: Iterable[Version]) -> Document:
    """Return each version's numbers, by its model's name and its number."""
    by_model: dict[int, list[tuple[str, CallStats]]] = {}
    for endpoint, _, stats in telemetry.calls():
        if endpoint.inference:
            by_model.setdefault(id(stats.model), []).append((endpoint.protocol, stats))
    known = telemetry.models()
    models: Document = {}
    for version in versions:
        name, number = version.files.name, version.files.version
        model = known.get((name, number), ModelStats())
        row = _state(version) | _calls(model, by_model.get(id(model), []))
        models.setdefault(printable(name), {})[str(number)] = row
    return models


def _state(version: Version) -> Document:
    servable = version.servable
    return {
        "state": {"state": version.state.value, "ready": version.ready, "reason": version.reason},
        "platform": "" if servable is None else servable.platform,
        "queue_depth": 0 if servable is None else servable.queue_depth,
        "in_flight": 0 if servable is None else servable.leases,
    }


def _calls(model: ModelStats, calls: Iterable[tuple[str, CallStats]]) -> Document:
    protocols: dict[str, int] = {}
    waited, queue, compute = 0, 0.0, 0.0
    for protocol, stats in calls:
        protocols[protocol] = protocols.get(protocol, 0) + stats.latency.count
        if stats.queue is not None and stats.compute is not None:
            waited += stats.queue.count
            queue += stats.queue.sum
            compute += stats.compute.sum
    executed, executions = model.recent_executions
    return {
        "requests": model.requests,
        "failures": model.failures,
        "protocols": protocols,
        "request_rate": model.request_rate,
        "latencies": points_of(model.recent_latencies()),
        "waited": waited,
        "queue": queue,
        "compute": compute,
        "executed": executed,
        "executions": executions,
        "last_inference": model.used,
    }


def _row(name: str, version: int, row: Document) -> Document:
    waited, executions = row["waited"], row["executions"]
    return {
        "name": name,
        "version": version,
        **row["state"],
        **{key: row[key] for key in ("platform", "queue_depth", "in_flight", "requests", "failures", "protocols")},
        "request_rate": _rounded(row["request_rate"]),
        "latency_ms": {name: _rounded(_milliseconds(row["latencies"], share)) for name, share in SHARES.items()},
        "queue_ms": _rounded(row["queue"] / waited / 1e3) if waited else None,
        "compute_ms": _rounded(row["compute"] / waited / 1e3) if waited else None,
        "mean_batch_size": _rounded(row["executed"] / executions) if executions > 0 else None,
        "last_inference": row["last_inference"] or None,
    }


def _milliseconds(points: Points, share: int) -> float | None:
    """Return the quantile `share`, in ten-thousandths, in milliseconds; points are in seconds."""
    seconds = point(points, share)
    return None if seconds is None else seconds * 1e3


def _second(second: Second) -> Document:
    report = asdict(second)
    if second.loop_lag is None:
        del report["loop_lag"]
    return report


def _seconds(histories: Sequence[Sequence[Document]]) -> list[Document]:
    """Merge histories by their ends: a worker with a shorter one was idle before it."""
    aligned = zip_longest(*(reversed(history) for history in histories))
    return [merged([second for second in found if second], SECOND_RULES) for found in aligned][::-1]


def _history(protocols: Sequence[str], seconds: Sequence[Document]) -> Document:
    return {
        "seconds": len(seconds),
        "requests": {
            protocol: [second["requests"].get(protocol, 0) for second in seconds] for protocol in protocols
        },
        "failures": [second["failures"] for second in seconds],
        **{
            f"{name}_ms": [_rounded(_milliseconds(second["latencies"], share)) for second in seconds]
            for name, share in SHARES.items()
        },
        "queue_depth": [second["queue_depth"] for second in seconds],
        "mean_batch_size": [
            _rounded(second["executed"] / second["executions"]) if second["executions"] > 0 else None
            for second in seconds
        ],
        "in_flight": [second["in_flight"] for second in seconds],
        "loop_lag_ms": [_rounded(second.get("loop_lag")) for second in seconds],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
