"""Accounting of calls, from first byte to last: statistics by kind, model, protocol and second.

A call costs a look-up and some additions on objects that its endpoint holds. Everything runs on the event loop, so
nothing is locked.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, NamedTuple

from triglot.core.call import Call
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING, Operation
from triglot.core.statistics import Histogram
from triglot.core.trace_context import TRACEPARENT, TRACESTATE, Span
from triglot.telemetry.points import Points

ENDED: Final = -1
"""Version number under which the calls of a model's older ended versions are merged."""
RECENT_SECONDS: Final = 10
RECENT_CALLS: Final = 1000
"""A model's recent calls: those of this many seconds, and at most this many of their latencies."""


class Kind(NamedTuple):
    """The labels of a call's statistics; version 0: no version was found, or `ENDED`."""

    model: str
    version: int
    code: Code


DEADLINE_SLACK: Final = 0.02
"""Seconds before its deadline from which a cancelled call counts as timed out: the client's clock started
earlier."""

ClientKind = tuple[str, Operation, Code]
"""The labels of a client's calls; the text is the `group` of the client's `Permission`."""


class CallStats:
    """Statistics of the calls of one kind. Times are in microseconds.

    `queue`, `compute` and `batches` (number of calls by batch size) cover executed calls; the histograms are None
    before the first. `shares` is the calls' share of the compute time of their batches. `codec` is None for
    endpoints without inference. `used`: the time of the last call, in seconds since the epoch.
    """

    __slots__ = (
        "batches",
        "bytes_in",
        "bytes_out",
        "codec",
        "compute",
        "latency",
        "model",
        "queue",
        "shares",
        "used",
    )

    def __init__(self, model: ModelStats, *, inference: bool) -> None:
        self.model = model
        self.latency = Histogram()
        self.codec = Histogram() if inference else None
        self.queue: Histogram | None = None
        self.compute: Histogram | None = None
        self.batches: dict[int, int] = {}
        self.shares = 0.0
        self.bytes_in = self.bytes_out = 0
        self.used = 0.0

    def executed(
        self, size: int, queue_seconds: float, compute_seconds: float, span: Span | None = None, now: float = 0.0
    ) -> None:
        """Count a call that was executed in a batch of `size`; see `Histogram.add` for its `span`."""
        if self.queue is None or self.compute is None:
            self.queue, self.compute = Histogram(), Histogram()
        self.queue.add(queue_seconds * 1e6, span, now)
        self.compute.add(compute_seconds * 1e6, span, now)
        self.batches[size] = self.batches.get(size, 0) + 1
        self.shares += compute_seconds * 1e6 / size

    def merge(self, other: CallStats) -> None:
        """Add the statistics of `other`, of the same endpoint."""
        self.latency.merge(other.latency)
        if self.codec is not None and other.codec is not None:
            self.codec.merge(other.codec)
        if other.queue is not None and other.compute is not None:
            if self.queue is None or self.compute is None:
                self.queue, self.compute = Histogram(), Histogram()
            self.queue.merge(other.queue)
            self.compute.merge(other.compute)
        for size, count in other.batches.items():
            self.batches[size] = self.batches.get(size, 0) + count
        self.shares += other.shares
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.used = max(self.used, other.used)


class Traffic:
    """Totals of inference calls: ended, failed, executed, and the number of executions."""

    __slots__ = ("executed", "executions", "failures", "requests")

    def __init__(self) -> None:
        self.requests = self.failures = self.executed = 0
        self.executions = 0.0

    def sums(self) -> tuple[int, int, int, float]:
        """Return requests, failures, executed, executions."""
        return self.requests, self.failures, self.executed, self.executions

    def merge(self, other: Traffic) -> None:
        """Add the totals of `other`."""
        self.requests += other.requests
        self.failures += other.failures
        self.executed += other.executed
        self.executions += other.executions


class ModelStats(Traffic):
    """Totals and recent latencies of the inference calls of one model version. `used` as in `CallStats`."""

    __slots__ = ("_ends", "latencies", "used")

    def __init__(self) -> None:
        super().__init__()
        self.used = 0.0
        self.latencies: deque[float] = deque(maxlen=RECENT_CALLS)
        """In seconds, the newest last."""
        self._ends = deque([self.sums()], RECENT_SECONDS + 1)

    def end_second(self) -> None:
        """Mark the end of a second."""
        self._ends.append(self.sums())

    def merge(self, other: Traffic) -> None:
        """Add the totals of `other`, none of them as recent calls."""
        super().merge(other)
        self._ends = deque([self.sums()], RECENT_SECONDS + 1)

    @property
    def request_rate(self) -> float:
        """Recent calls per second."""
        passed = len(self._ends) - 1
        return (self._ends[-1][0] - self._ends[0][0]) / passed if passed else 0.0

    @property
    def recent_executions(self) -> tuple[int, float]:
        """Number of recent calls that were executed, and of their executions."""
        before = self._ends[0]
        return self.executed - before[2], self.executions - before[3]

    def recent_latencies(self) -> list[float]:
        """Return the latencies of the recent calls, in seconds, ascending."""
        recent = self.requests - self._ends[0][0]
        return sorted(list(self.latencies)[-recent:]) if recent else []


@dataclass(frozen=True, slots=True)
class Second:
    """One second of all inference calls: requests that ended, by protocol, and those that failed.

    `latencies`: their distribution in seconds. `queue_depth` and `in_flight` are as of its end. `executed`: the
    requests that were executed, in `executions` executions. `loop_lag`: the longest lag of the event loop in
    milliseconds; None if it was not measured.
    """

    requests: dict[str, int]
    failures: int = 0
    latencies: Points = field(default_factory=list)
    queue_depth: int = 0
    in_flight: int = 0
    executed: int = 0
    executions: float = 0.0
    loop_lag: float | None = None


MAX_MODEL_NAMES, MAX_NAME = 16, 128
"""Limits on the number and length (in characters) of unknown model names that are counted separately."""
REFUSALS: Final = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
"""Codes of calls whose model is not counted without a version: nothing that refused clients sent is kept."""
MAX_KINDS: Final = 20_000
"""Limit on kinds of calls; above it, the least recently used ones are dropped."""
ENDED_KEPT: Final = 5
"""Ended versions of a model whose statistics are kept, as their last values may not have been read yet."""


class Kinds:
    """Limits the kinds of calls of all endpoints, and holds the totals of each model version.

    `models`: totals by name and version; calls without a version are counted together, and so are those of a
    model's `ENDED` versions.
    """

    def __init__(self, endpoints: Mapping[Any, Endpoint]) -> None:
        self.models: dict[tuple[str, int], ModelStats] = {}
        self.count = 0
        self._endpoints = endpoints
        self._unknown_names: set[str] = set()

    def kind(self, model: str, version: int, code: Code) -> Kind:
        """Return the kind that a call is counted under; without a version, a client may have made up the name."""
        if not version and code in REFUSALS:
            model = ""
        elif not version and model not in self._unknown_names:
            if len(self._unknown_names) >= MAX_MODEL_NAMES or len(model) > MAX_NAME:
                model = ""
            self._unknown_names.add(model)
        return Kind(model, version, code)

    def model(self, name: str, version: int) -> ModelStats:
        """Return the totals of a version."""
        return self.models.setdefault((name, version) if version else ("", 0), ModelStats())

    def make_room(self) -> None:
        """Count a new kind; above the limit, drop the least recently used ones."""
        self.count += 1
        if self.count <= MAX_KINDS:
            return
        calls = [(endpoint, *call) for endpoint in self._endpoints.values() for call in endpoint.calls()]
        used = sorted((stats.used, at) for at, (_, _, stats) in enumerate(calls))
        doomed = {at for _, at in used[: MAX_KINDS // 10]}
        kept = set()
        for at, (endpoint, kind, stats) in enumerate(calls):
            if at in doomed:
                endpoint.forget(kind)
            else:
                kept.add(id(stats.model))
        self.models = {key: model for key, model in self.models.items() if id(model) in kept}
        self.count -= len(doomed)

    def fold(self, loaded: Collection[tuple[str, int]]) -> None:
        """Merge each model's unloaded versions into `ENDED`, except for the most recently called ones."""
        of_models: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for (name, version), model in self.models.items():
            if version > 0 and (name, version) not in loaded:
                of_models[name].append((model.used, version))
        doomed = {
            (name, version)
            for name, versions in of_models.items()
            for _, version in sorted(versions)[:-ENDED_KEPT]
        }
        if not doomed:
            return
        for name, version in doomed:
            self.model(name, ENDED).merge(self.models.pop((name, version)))
        self.count -= sum([endpoint.fold(doomed) for endpoint in self._endpoints.values()])


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter, as the metrics show it: a value for each combination of values of its `labels`.

    `gauge`: the values may fall.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    values: Sequence[tuple[tuple[str, ...], float]]
    gauge: bool = False


@mypyc_attr(allow_interpreted_subclasses=True)
class Observer:
    """Observes calls, besides the statistics: spans, access log, audit log, request records. On the event loop.

    Each is a part, which is in `Telemetry.observers` once a configuration asked for it.
    """

    __slots__ = ()

    def begin(self, call: Call, endpoint: Endpoint) -> None:
        """Observe a call that begins; once more if its request has a trace context of its own."""

    def end(self, call: Call, endpoint: Endpoint, code: Code, end_time: float, refusal: str) -> None:
        """Observe the end of a call at `end_time` of `time.perf_counter`. `refusal`: see `refusal_of`."""

    def precede(self, call: Call, protocol: str, entrypoint: str, method: str) -> Awaitable[None] | None:
        """Observe an administrative call before it takes effect, where `audit_required`.

        Await what it returns, unless it is None; either raises to refuse the call.
        """
        return None

    def switch(self, level: int) -> None:
        """Observe calls that begin from now on: none of them at 0, all at 1, more of each at 2."""

    def counters(self) -> Iterable[Counter]:
        """Return the counters to add to the metrics. Callable on another thread."""
        return ()

    def close(self) -> None:
        """Stop observing, and write what is queued. Blocks, on another thread."""


class Endpoint:
    """A method of a protocol over gRPC or REST, with the statistics of its calls. Made by `Telemetry.endpoint`.

    The transport increments and decrements `in_flight`.
    """

    __slots__ = (
        "_calls",
        "_kinds",
        "_latencies",
        "_observers",
        "_traffic",
        "clients",
        "entrypoint",
        "in_flight",
        "inference",
        "internal",
        "method",
        "protocol",
        "refusals",
        "route",
        "rpc",
    )

    def __init__(
        self,
        kinds: Kinds,
        protocol: str,
        entrypoint: str,
        method: str,
        traffic: Traffic | None,
        latencies: deque[float],
        observers: Sequence[Observer] = (),
        *,
        internal: bool = False,
    ) -> None:
        self._observers = observers
        self.rpc = method
        """Full name of the method, if this is gRPC."""
        self.route = "", ""
        """Verb and path of the method's first route, if this is REST."""
        self.protocol = protocol
        self.entrypoint = entrypoint
        self.method = method
        self.inference = traffic is not None
        self.internal = internal
        self.in_flight = 0
        self.clients: dict[ClientKind, int] = {}
        """Calls by client kind, if an access file is used."""
        self.refusals: dict[ClientKind, int] = {}
        """Calls that access control rejected, by client kind."""
        self._kinds = kinds
        self._traffic = traffic
        self._latencies = latencies
        self._calls: dict[tuple[str, int, Code], CallStats] = {}

    def begin(self, call: Call, size: int = 0) -> None:
        """Begins a call, of which `size` bytes have been received; it is in flight until `end`."""
        self.in_flight += 1
        call.is_counted = True
        call.bytes_in = size
        call.arrived = call.lap = perf_counter()
        if self._observers:
            for observer in self._observers:
                observer.begin(call, self)

    def continue_trace(self, call: Call, parameters: Mapping[str, object]) -> None:
        """Replace the trace context of the call by that in its request's parameters."""
        traceparent, tracestate = parameters.get(TRACEPARENT), parameters.get(TRACESTATE, "")
        call.context = str(traceparent), str(tracestate)
        call.span = None
        for observer in self._observers:
            observer.begin(call, self)

    def end(self, call: Call, code: Code, refusal: str = "") -> None:
        """End and count a call; with `Code.OK`, `Call.outcome` is used. `refusal`: see `refusal_of`."""
        if code is Code.CANCELLED and (remaining := call.remaining) is not None and remaining < DEADLINE_SLACK:
            # gRPC reports a cancellation and a deadline in the same way; the client sees DEADLINE_EXCEEDED.
            code = Code.DEADLINE_EXCEEDED
        if call.runs_since:
            call.execution_ended()  # The model has not ended it: the caller disconnected before.
        code = code or call.outcome
        now = perf_counter()
        self.in_flight -= 1
        self.record(call, code, now - call.arrived)
        if refusal or call.permission is not EVERYTHING:
            kind = call.permission.group, call.operation, code
            self.clients[kind] = self.clients.get(kind, 0) + 1
            if refusal:
                self.refusals[kind] = self.refusals.get(kind, 0) + 1
        if self._observers:
            for observer in self._observers:
                observer.end(call, self, code, now, refusal)

    def record(self, call: Call, code: Code, seconds: float) -> None:
        """Count a call that ended after `seconds`."""
        stats = self._calls.get((call.model_name, call.model_version, code))
        if stats is None:
            stats = self._stats(call, code)
        span = call.span
        stats.used = now = time.time()
        stats.latency.add(seconds * 1e6, span, now)
        stats.bytes_in += call.bytes_in
        stats.bytes_out += call.bytes_out
        traffic = self._traffic
        if traffic is None:
            return
        model = stats.model
        model.used = now
        traffic.requests += 1
        model.requests += 1
        self._latencies.append(seconds)
        model.latencies.append(seconds)
        if (statistics := call.statistics) is not None:
            statistics.on_end(call, code, seconds, now, span)
        if stats.codec is not None:
            stats.codec.add(call.codec_seconds * 1e6)
        if code is not Code.OK:
            traffic.failures += 1
            model.failures += 1
        if size := call.batch_size:
            stats.executed(size, call.queue_seconds, call.compute_seconds, span, now)
            share = 1 / size
            traffic.executed += 1
            traffic.executions += share
            model.executed += 1
            model.executions += share

    def _stats(self, call: Call, code: Code) -> CallStats:
        kind = self._kinds.kind(call.model_name, call.model_version, code)
        stats = self._calls.get(kind)
        if stats is None:
            self._kinds.make_room()
            stats = CallStats(self._kinds.model(kind.model, kind.version), inference=self.inference)
            self._calls[kind] = stats
        return stats

    def calls(self) -> list[tuple[Kind, CallStats]]:
        """Return the statistics of each kind of call."""
        return [(Kind(*kind), stats) for kind, stats in list(self._calls.items())]

    def forget(self, kind: Kind) -> None:
        """Drop the statistics of this kind of call."""
        del self._calls[kind]

    def fold(self, versions: Collection[tuple[str, int]]) -> int:
        """Merge the calls of these versions into their models' `ENDED` ones; return by how many kinds fewer."""
        doomed = [kind for kind in self._calls if kind[:2] in versions]
        if not doomed:
            return 0
        # Replaced in one step: a reader on another thread must not see a call twice.
        before, calls = len(self._calls), dict(self._calls)
        for name, version, code in doomed:
            ended_versions = CallStats(self._kinds.model(name, ENDED), inference=self.inference)
            for number in (ENDED, version):
                if (stats := calls.pop((name, number, code), None)) is not None:
                    ended_versions.merge(stats)
            calls[name, ENDED, code] = ended_versions
        self._calls = calls
        return before - len(calls)
