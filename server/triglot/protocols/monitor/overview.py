"""The page's document: the models, the totals and the last minutes.

Strategy: counts are collected in a form that can be added, and then converted; so several workers' numbers become
one document as those of one do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from triglot.repository.manager.plan import Version
from triglot.telemetry.calls import CallStats, ModelStats, Second
from triglot.telemetry.points import Points, point
from triglot.telemetry.store import Telemetry

SHARES = {"p50": 5000, "p90": 9000, "p99": 9900}
Document = dict[str, Any]


def printable(name: str) -> str:
    """Replace lone surrogates, which may be in clients' and files' names but not in UTF-8."""
    return name.encode(errors="replace").decode()


def overview(telemetry: Telemetry, versions: Sequence[Version]) -> Document:
    """Returns the document without the server's part. Numbers are None if nothing was measured.

    May run on another thread.
    """
    values = {name: metric.value for name, metric in list(telemetry.metrics.by_name.items())}
    counted = collect(telemetry, versions)
    return finished(counted, values, list(telemetry.history))


def collect(telemetry: Telemetry, versions: Sequence[Version]) -> Document:
    """Returns what can be added: the totals, the protocols, and a row for each version."""
    traffic = telemetry.traffic()
    return {
        "totals": {
            "requests": sum(one.requests for one in traffic.values()),
            "failures": sum(one.failures for one in traffic.values()),
            "in_flight": telemetry.in_flight,
            "queue_depth": sum(one.servable.queue_depth for one in versions if one.servable is not None),
        },
        "protocols": {
            protocol: {"requests": one.requests, "failures": one.failures} for protocol, one in traffic.items()
        },
        "models": _models(telemetry, versions),
    }


def finished(counted: Document, values: dict[str, float | None], seconds: Sequence[Second]) -> Document:
    """Returns the document, with the latest values of the metrics and the last minutes."""
    return {
        "metrics": [{"name": printable(name), "value": _rounded(value)} for name, value in values.items()],
        "totals": counted["totals"],
        "protocols": counted["protocols"],
        "models": [_finished_row(row) for row in counted["models"]],
        "history": _history(list(counted["protocols"]), seconds),
    }


def _models(telemetry: Telemetry, versions: Iterable[Version]) -> list[Document]:
    by_model: dict[int, list[tuple[str, CallStats]]] = {}
    for endpoint, _, stats in telemetry.calls():
        if endpoint.inference:
            by_model.setdefault(id(stats.model), []).append((endpoint.protocol, stats))
    known = telemetry.models()
    rows = []
    for version in sorted(versions, key=lambda one: (one.files.name, one.files.version)):
        model = known.get((version.files.name, version.files.version), ModelStats())
        rows.append(_state(version) | _calls(model, by_model.get(id(model), [])))
    return rows


def _state(version: Version) -> Document:
    servable = version.servable
    return {
        "name": printable(version.files.name),
        "version": version.files.version,
        "state": version.state.value,
        "ready": version.ready,
        "reason": version.reason,
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
        "latencies": [(seconds, 1) for seconds in model.recent_latencies()],
        "waited": waited,
        "queue": queue,
        "compute": compute,
        "executed": executed,
        "executions": executions,
        "last_inference": model.used,
    }


def _finished_row(row: Document) -> Document:
    waited, executions = row["waited"], row["executions"]
    return {
        **{key: row[key] for key in ("name", "version", "state", "ready", "reason", "platform")},
        **{key: row[key] for key in ("queue_depth", "in_flight", "requests", "failures", "protocols")},
        "request_rate": _rounded(row["request_rate"]),
        "latency_ms": {name: _rounded(milliseconds(row["latencies"], share)) for name, share in SHARES.items()},
        "queue_ms": _rounded(row["queue"] / waited / 1e3) if waited else None,
        "compute_ms": _rounded(row["compute"] / waited / 1e3) if waited else None,
        "mean_batch_size": _rounded(row["executed"] / executions) if executions > 0 else None,
        "last_inference": row["last_inference"] or None,
    }


def milliseconds(points: Points, share: int) -> float | None:
    """Returns the quantile `share`, in ten-thousandths, in milliseconds; points are in seconds."""
    seconds = point(points, share)
    return None if seconds is None else seconds * 1e3


def _history(protocols: Sequence[str], seconds: Sequence[Second]) -> Document:
    return {
        "seconds": len(seconds),
        "requests": {protocol: [second.requests.get(protocol, 0) for second in seconds] for protocol in protocols},
        "failures": [second.failures for second in seconds],
        "p50_ms": [_rounded(second.p50) for second in seconds],
        "p90_ms": [_rounded(second.p90) for second in seconds],
        "p99_ms": [_rounded(second.p99) for second in seconds],
        "queue_depth": [second.queue_depth for second in seconds],
        "mean_batch_size": [_rounded(second.mean_batch_size) for second in seconds],
        "in_flight": [second.in_flight for second in seconds],
        "loop_lag_ms": [_rounded(second.loop_lag) for second in seconds],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
