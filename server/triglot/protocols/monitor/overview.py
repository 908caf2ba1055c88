"""What the page shows: one document with the models, the totals and the last minutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from triglot.protocols.monitor.triton_metrics import printable
from triglot.repository.plan import Version
from triglot.telemetry.stats import CallStats, ModelStats, milliseconds
from triglot.telemetry.store import Telemetry

SHARES = {"p50": 5000, "p90": 9000, "p99": 9900}


def overview(telemetry: Telemetry, versions: Sequence[Version]) -> dict[str, Any]:
    """All of it but what is said of the server. Numbers are None where nothing was measured.

    May be made on another thread.
    """
    traffic = telemetry.traffic()
    return {
        "metrics": [
            {"name": printable(name), "value": _rounded(metric.value)}
            for name, metric in list(telemetry.metrics.by_name.items())
        ],
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
        "history": _history(telemetry),
    }


def _models(telemetry: Telemetry, versions: Iterable[Version]) -> list[dict[str, Any]]:
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


def _state(version: Version) -> dict[str, Any]:
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


def _calls(model: ModelStats, calls: Iterable[tuple[str, CallStats]]) -> dict[str, Any]:
    protocols: dict[str, int] = {}
    executed, queue, compute = 0, 0.0, 0.0
    for protocol, stats in calls:
        protocols[protocol] = protocols.get(protocol, 0) + stats.latency.count
        if stats.queue is not None and stats.compute is not None:
            executed += stats.queue.count
            queue += stats.queue.sum
            compute += stats.compute.sum
    recent = model.recent_latencies()
    return {
        "requests": model.requests,
        "failures": model.failures,
        "protocols": protocols,
        "request_rate": _rounded(model.request_rate),
        "latency_ms": {name: _rounded(milliseconds(recent, share)) for name, share in SHARES.items()},
        "queue_ms": _rounded(queue / executed / 1e3) if executed else None,
        "compute_ms": _rounded(compute / executed / 1e3) if executed else None,
        "mean_batch_size": _rounded(model.mean_batch_size),
        "last_inference": model.used or None,
    }


def _history(telemetry: Telemetry) -> dict[str, Any]:
    seconds = list(telemetry.history)
    return {
        "seconds": len(seconds),
        "requests": {
            protocol: [second.requests.get(protocol, 0) for second in seconds] for protocol in telemetry.traffic()
        },
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
