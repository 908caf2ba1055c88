"""The store of the server's metrics.

A call costs a look-up and some additions on objects that its endpoint holds; sums over kinds of calls and time
series are derived from these once a second, or on reading. Everything runs on the event loop, so nothing is
locked; only `Monitor` is thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triglot.core.statistics import Histogram
from triglot.telemetry.calls import (
    CallStats,
    Counter,
    Endpoint,
    Kind,
    Kinds,
    ModelStats,
    Observer,
    Second,
    Traffic,
)
from triglot.telemetry.monitor import Monitor
from triglot.telemetry.points import points_of
from triglot.telemetry.process import ProcessUsage
from triglot.telemetry.series import Metric, Metrics

log = logging.getLogger(__name__)

MAX_LATENCIES = 10_000
"""Latencies kept of one second; with more calls, percentiles are those of the last ones."""
HISTORY_SECONDS = 300
LAG_SECONDS = 0.1
"""Interval at which the event loop's lag is measured."""
MAX_MISSED_SECONDS = HISTORY_SECONDS
"""Limit on seconds without a tick that are filled in as empty; more means that the clock jumped."""
MAX_PATHS = 1000
"""Limit on model paths whose loads are counted."""


class MonitorLog:
    """Writes the monitor log, a file with the metrics' values of the last second (grps 7).

    A failure is logged once until a write succeeds again.
    """

    def __init__(self) -> None:
        self._failing = False

    def write(self, file: Path, text: str) -> None:
        """Replace the file atomically: a reader always sees all lines of one second."""
        new = file.with_name(file.name + ".new")
        try:
            new.write_text(text, encoding="utf-8", errors="replace")
            new.replace(file)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            if not self._failing:
                log.warning("cannot write metrics to %s: %s", file, error)
            self._failing = True
        else:
            self._failing = False


@dataclass(slots=True)
class Loads:
    """Loads from one path: number of successes and failures, and the total seconds of successful loads."""

    successes: int = 0
    failures: int = 0
    seconds: float = 0.0


class Telemetry:
    """Everything that is measured since the start. Owned by the server; runs on its event loop.

    `monitor` receives the models' own metrics; `clock` returns seconds. `queue_depth` returns the number of queued
    requests, `loaded` the loaded versions by model and number, or None if unknown. `log_file` is rewritten every
    second with the metrics (grps 7).
    """

    def __init__(self, monitor: Monitor | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.monitor = Monitor() if monitor is None else monitor
        self.queue_depth: Callable[[], int] = lambda: 0
        self.loaded: Callable[[], Collection[tuple[str, int]] | None] = lambda: None
        self.log_file: Path | None = None
        self.latency_counters = True
        """Whether Triton's counters of durations are exported."""
        self.mlserver_names = False
        """Whether MLServer's metrics are exported, too."""
        self.metrics = Metrics()
        self.observers: list[Observer] = []
        """Of all endpoints: those that the configuration asks for."""
        self.counters: list[Callable[[], Iterable[Counter]]] = []
        """Further counters to add to the metrics. Callable on another thread."""
        self.loop_lag = Histogram()
        self.loads: dict[str, Loads] = {}
        """By path; the most recent paths only."""
        self.history: deque[Second] = deque(maxlen=HISTORY_SECONDS)
        self.seconds = 0
        """Number of finished seconds."""
        self._clock = clock
        self._started = self._ticked = clock()
        self._usage = ProcessUsage()
        self._log = MonitorLog()
        self._worst_lag: float | None = None
        self._endpoints: dict[tuple[str, str, str], Endpoint] = {}
        self._traffic: dict[str, Traffic] = {}
        self._ends: dict[str, tuple[int, int, int, float]] = {}
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._kinds = Kinds(self._endpoints)

    def endpoint(
        self, protocol: str, entrypoint: str, method: str, *, inference: bool, internal: bool = False
    ) -> Endpoint:
        """Return the endpoint for `method` of `protocol` ("kserve", ...) at `entrypoint` ("GRPC" or "REST").

        `inference`: whether its calls run a model. `internal`: models call each other through it; this counts for
        the called model, but not in the totals of clients' calls.
        """
        key = protocol, entrypoint, method
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            traffic, latencies = None, self._latencies
            if internal:
                traffic, latencies = Traffic(), deque(maxlen=0)
            elif inference:
                traffic = self._traffic.setdefault(protocol, Traffic())
                self._ends.setdefault(protocol, traffic.sums())
            endpoint = self._endpoints[key] = Endpoint(
                self._kinds,
                protocol,
                entrypoint,
                method,
                traffic,
                latencies,
                self.observers,
                internal=internal,
            )
        return endpoint

    def loaded_from(self, path: str, seconds: float, *, failed: bool) -> None:
        """Count a load of a model that ended after `seconds`."""
        loads = self.loads[path] = self.loads.pop(path, Loads())
        if failed:
            loads.failures += 1
        else:
            loads.successes += 1
            loads.seconds += seconds
        if len(self.loads) > MAX_PATHS:
            del self.loads[next(iter(self.loads))]

    # --- reading ---

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def kinds(self) -> int:
        """Number of kinds of calls."""
        return self._kinds.count

    def endpoints(self) -> list[Endpoint]:
        """Return all endpoints."""
        return list(self._endpoints.values())

    def calls(self) -> Iterator[tuple[Endpoint, Kind, CallStats]]:
        """Yield the statistics of each kind of call, by endpoint. Callable on another thread."""
        for endpoint in self.endpoints():
            for kind, stats in endpoint.calls():
                yield endpoint, kind, stats

    def models(self) -> dict[tuple[str, int], ModelStats]:
        """Return the totals of each model version, and of each model's `ENDED` versions, by name and version."""
        return dict(self._kinds.models)

    def traffic(self) -> dict[str, Traffic]:
        """Return the totals of each protocol."""
        return dict(self._traffic)

    @property
    def in_flight(self) -> int:
        """Number of clients' inference calls in flight."""
        return sum(
            [
                endpoint.in_flight
                for endpoint in self._endpoints.values()
                if endpoint.inference and not endpoint.internal
            ]
        )

    def metric(self, name: str) -> Metric | None:
        """Return a metric of grps' monitor, built in or a model's own."""
        return self.metrics.by_name.get(name)

    # --- time ---

    async def run(self) -> None:
        """Measures the event loop's lag and finishes each second, until cancelled."""
        while True:
            due = self._clock() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            now = self._clock()
            self.lagged(max(0.0, now - due))
            finished = self.seconds
            try:
                self.tick(now)
                if self.log_file is not None and self.seconds > finished:
                    await asyncio.to_thread(self._log.write, self.log_file, self.metrics.log_text())
            except Exception:
                log.exception("telemetry: lost the metrics of one second")

    def lagged(self, seconds: float) -> None:
        """Record that the event loop was late by `seconds`."""
        self.loop_lag.add(seconds * 1e6)
        self._worst_lag = max(seconds, self._worst_lag or 0.0)

    def tick(self, now: float) -> None:
        """Finish the seconds that have passed until `now`.

        If there are several, all values belong to the last one: the loop was blocked before it.
        """
        passed = int(now - self._ticked)
        if passed < 1:
            self.metrics.collect(self.monitor.drain())
            return
        self._ticked += passed
        self.seconds += passed
        for _ in range(min(passed - 1, MAX_MISSED_SECONDS)):
            self.metrics.end_second({})
            self.history.append(Second(dict.fromkeys(self._traffic, 0)))
            for model in self._kinds.models.values():
                model.end_second()
        self._end_second()
        loaded = self.loaded()
        if loaded is not None:
            self._kinds.fold(loaded)

    def _end_second(self) -> None:
        latencies = sorted(self._latencies)
        self._latencies.clear()
        requests, failures, executed, executions = {}, 0, 0, 0.0
        for protocol, traffic in self._traffic.items():
            before, after = self._ends[protocol], traffic.sums()
            self._ends[protocol] = after
            requests[protocol] = after[0] - before[0]
            failures += after[1] - before[1]
            executed += after[2] - before[2]
            executions += after[3] - before[3]
        for model in self._kinds.models.values():
            model.end_second()
        self.metrics.collect(self.monitor.drain())
        self.metrics.end_second(self._built_in(sum(requests.values()), failures, latencies))
        lag, self._worst_lag = self._worst_lag, None
        self.history.append(
            Second(
                requests,
                failures,
                points_of(latencies),
                queue_depth=self.queue_depth(),
                in_flight=self.in_flight,
                executed=executed,
                executions=executions,
                loop_lag=None if lag is None else lag * 1e3,
            )
        )

    def _built_in(self, requests: int, failures: int, ordered: list[float]) -> dict[str, list[float]]:
        """Return the second's values of the built-in metrics (grps 7)."""
        in_ms = [seconds * 1e3 for seconds in ordered]
        return {
            "*qps": [requests],
            "*fail_rate(%)": [100 * failures / requests] if requests else [],
            "*latency_avg(ms)": in_ms,
            "*latency_max(ms)": in_ms[-1:],
            "*latency_cdf(ms)": in_ms,
            "*cpu_usage(%)": [self._usage.cpu_percent()],
            "*mem_usage(%)": [self._usage.memory_percent()],
        }
