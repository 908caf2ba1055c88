"""Calls, each from its first byte to its last, and what is kept of them: by kind, model, protocol and second.

Strategy: a call costs a look-up and some additions on objects that its endpoint holds. All of it runs on the event
loop, so nothing is locked.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.histogram import Histogram, rank
from triglot.core.operation import ADMINISTRATION, Operation
from triglot.core.permission import EVERYTHING
from triglot.core.trace_context import TRACEPARENT, TRACESTATE, Span
from triglot.telemetry.access_log import AccessLine, AccessLog
from triglot.telemetry.audit_log import AuditLog
from triglot.telemetry.points import Points
from triglot.telemetry.spans.recorder import SpanRecorder

ENDED = -1
"""Stands for the versions of a model that have ended and are not told apart any more."""
RECENT_SECONDS = 10
RECENT_CALLS = 1000
"""A model's recent calls: of so many seconds, and of their latencies at most so many."""


class Kind(NamedTuple):
    """What the calls of an endpoint are told apart by; version 0: no version was found, or `ENDED`."""

    model: str
    version: int
    code: Code


ClientKind = tuple[str, Operation, Code]
"""What the calls of clients are told apart by; the text is the `group` of the client's `Permission`."""


class CallStats:
    """The calls of one kind. Times are in microseconds.

    `queue`, `compute` and `batches` (how many calls were executed in a batch of each size) are of the calls that
    were executed; None before the first. `shares` is their part of their batches' compute time. `codec` is None
    where nothing is inferred. `used`: the time of the last call, in seconds since the epoch.
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
        """Take in the calls of another one of the same endpoint."""
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
    """Inference calls since the start: those that ended, failed, and were executed, and the executions."""

    __slots__ = ("executed", "executions", "failures", "requests")

    def __init__(self) -> None:
        self.requests = self.failures = self.executed = 0
        self.executions = 0.0

    def sums(self) -> tuple[int, int, int, float]:
        """Requests, failures, executed, executions."""
        return self.requests, self.failures, self.executed, self.executions

    def merge(self, other: Traffic) -> None:
        """Take in the calls of another one."""
        self.requests += other.requests
        self.failures += other.failures
        self.executed += other.executed
        self.executions += other.executions


class ModelStats(Traffic):
    """The inference calls of one version of a model. `used` as in `CallStats`."""

    __slots__ = ("_ends", "latencies", "used")

    def __init__(self) -> None:
        super().__init__()
        self.used = 0.0
        self.latencies: deque[float] = deque(maxlen=RECENT_CALLS)
        """Seconds, the newest last."""
        self._ends = deque([self.sums()], RECENT_SECONDS + 1)

    def end_second(self) -> None:
        """A second has passed."""
        self._ends.append(self.sums())

    def merge(self, other: Traffic) -> None:
        """Take in the calls of another one, as calls of long ago."""
        super().merge(other)
        self._ends = deque([self.sums()], RECENT_SECONDS + 1)

    @property
    def request_rate(self) -> float:
        """Recent calls per second."""
        passed = len(self._ends) - 1
        return (self._ends[-1][0] - self._ends[0][0]) / passed if passed else 0.0

    @property
    def recent_executions(self) -> tuple[int, float]:
        """Recent calls that were executed, and their executions."""
        before = self._ends[0]
        return self.executed - before[2], self.executions - before[3]

    @property
    def mean_batch_size(self) -> float | None:
        """Of the recent executions; None if there are none."""
        executed, executions = self.recent_executions
        return executed / executions if executions > 0 else None

    def recent_latencies(self) -> list[float]:
        """Of the recent calls, in seconds, ascending."""
        recent = self.requests - self._ends[0][0]
        return sorted(list(self.latencies)[-recent:]) if recent else []


@dataclass(frozen=True, slots=True)
class Second:
    """One second of all inference calls: requests that ended by protocol, and those that failed.

    Latencies and the longest lag of the event loop are in milliseconds. `queue_depth` and `in_flight` are at its
    end. None: nothing to measure. `points`: of the latencies in seconds, where other workers have some, too.
    """

    requests: dict[str, int]
    failures: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    queue_depth: int = 0
    in_flight: int = 0
    mean_batch_size: float | None = None
    loop_lag: float | None = None
    points: Points = field(default_factory=list)


def milliseconds(ordered: list[float], share: int) -> float | None:
    """What `share` ten-thousandths of ascending seconds do not exceed."""
    return rank(ordered, share) * 1e3 if ordered else None


MAX_MODEL_NAMES, LONGEST_NAME = 200, 128
"""Names that clients make up are told apart up to this number, and to this length in characters."""
MAX_KINDS = 20_000
"""Kinds of calls that are kept. When there are more, those that were not used for longest are forgotten."""
ENDED_KEPT = 5
"""Versions of a model that are told apart after they have ended: somebody may not have read their last numbers."""


class Kinds:
    """The kinds of calls of some endpoints, how many there are, and the calls of each version.

    `models`: these by name and version; calls that found no version are counted together, and so are those of a
    model's `ENDED` versions.
    """

    def __init__(self, endpoints: Mapping[Any, Endpoint]) -> None:
        self.models: dict[tuple[str, int], ModelStats] = {}
        self.count = 0
        self._endpoints = endpoints
        self._made_up: set[str] = set()

    def kind(self, model: str, version: int, code: Code) -> Kind:
        """The kind that a call is counted under; without a version, the name may be a client's invention."""
        if not version and model not in self._made_up:
            if len(self._made_up) >= MAX_MODEL_NAMES or len(model) > LONGEST_NAME:
                model = ""
            self._made_up.add(model)
        return Kind(model, version, code)

    def model(self, name: str, version: int) -> ModelStats:
        """The calls of a version."""
        return self.models.setdefault((name, version) if version else ("", 0), ModelStats())

    def make_room(self) -> None:
        """For one more kind: when there is none, forget what was not used for longest."""
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
        """Of each model's versions that are not `loaded`, tell the last that were called apart, and no others."""
        ended: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for (name, version), model in self.models.items():
            if version > 0 and (name, version) not in loaded:
                ended[name].append((model.used, version))
        doomed = {
            (name, version) for name, versions in ended.items() for _, version in sorted(versions)[:-ENDED_KEPT]
        }
        if not doomed:
            return
        for name, version in doomed:
            self.model(name, ENDED).merge(self.models.pop((name, version)))
        self.count -= sum([endpoint.fold(doomed) for endpoint in self._endpoints.values()])


class Endpoint:
    """One thing that is called: a method of a protocol, by gRPC or REST. Made by `Telemetry.endpoint`.

    `in_flight` is for the transport to add to and subtract from.
    """

    __slots__ = (
        "_calls",
        "_kinds",
        "_latencies",
        "_traffic",
        "access_log",
        "audit_log",
        "clients",
        "entrypoint",
        "in_flight",
        "inference",
        "internal",
        "method",
        "protocol",
        "refusals",
        "rpc",
        "spans",
    )

    def __init__(
        self,
        kinds: Kinds,
        protocol: str,
        entrypoint: str,
        method: str,
        traffic: Traffic | None,
        latencies: deque[float],
        access_log: AccessLog,
        audit_log: AuditLog,
        spans: SpanRecorder,
        *,
        internal: bool = False,
    ) -> None:
        self.spans = spans
        self.rpc = method
        """Over gRPC, the method's full name."""
        self.protocol = protocol
        self.entrypoint = entrypoint
        self.method = method
        self.inference = traffic is not None
        self.internal = internal
        self.in_flight = 0
        self.access_log = access_log
        self.audit_log = audit_log
        self.clients: dict[ClientKind, int] = {}
        """Calls, where there is an access file."""
        self.refusals: dict[ClientKind, int] = {}
        """Calls that access control has refused."""
        self._kinds = kinds
        self._traffic = traffic
        self._latencies = latencies
        self._calls: dict[tuple[str, int, Code], CallStats] = {}

    def record(
        self, call: Call, code: Code, seconds: float, codec_seconds: float, bytes_in: int, bytes_out: int
    ) -> None:
        """One call has ended."""
        stats = self._calls.get((call.model_name, call.model_version, code))
        if stats is None:
            stats = self._stats(call, code)
        span = call.span
        stats.used = now = time.time()
        stats.latency.add(seconds * 1e6, span, now)
        stats.bytes_in += bytes_in
        stats.bytes_out += bytes_out
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
            statistics.ended(call.times, code, seconds, now, span)
        if stats.codec is not None:
            stats.codec.add(codec_seconds * 1e6)
        if code is not Code.OK:
            traffic.failures += 1
            model.failures += 1
        if size := call.times.batch_size:
            stats.executed(size, call.times.queue_seconds, call.times.compute_seconds, span, now)
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
        """What is kept of each kind of call."""
        return [(Kind(*kind), stats) for kind, stats in list(self._calls.items())]

    def forget(self, kind: Kind) -> None:
        """Keep nothing of this kind of call any more."""
        del self._calls[kind]

    def fold(self, versions: Collection[tuple[str, int]]) -> int:
        """Count the calls of these versions as their models' `ENDED` ones; by how many kinds that makes fewer."""
        doomed = [kind for kind in self._calls if kind[:2] in versions]
        if not doomed:
            return 0
        # Put in place at once: a reader on another thread finds no call twice.
        before, calls = len(self._calls), dict(self._calls)
        for name, version, code in doomed:
            ended = CallStats(self._kinds.model(name, ENDED), inference=self.inference)
            for number in (ENDED, version):
                if (stats := calls.pop((name, number, code), None)) is not None:
                    ended.merge(stats)
            calls[name, ENDED, code] = ended
        self._calls = calls
        return before - len(calls)


DEADLINE_SLACK = 0.02
"""Seconds before a call's deadline in which its end is put down to it: the client's clock has started earlier."""


class Observation:
    """In flight from its making until `end`; the time between `decoded` and `answered` is not the codec's.

    `bytes_in`: what is received already.
    """

    __slots__ = ("_bytes_in", "_bytes_out", "_call", "_codec_seconds", "_endpoint", "_lap", "_started")

    def __init__(self, endpoint: Endpoint, call: Call, bytes_in: int = 0) -> None:
        endpoint.in_flight += 1
        call.counted = True
        self._endpoint = endpoint
        self._call = call
        self._bytes_in = bytes_in
        self._bytes_out = 0
        self._codec_seconds = 0.0
        self._started = self._lap = perf_counter()
        if endpoint.spans.on:
            endpoint.spans.begin(call, internal=endpoint.internal)

    def received(self, size: int) -> None:
        """A body of `size` bytes has come; decoding begins."""
        self._bytes_in += size
        self._lap = perf_counter()

    def received_context(self, parameters: Mapping[str, object]) -> None:
        """The request has a trace context of its own, among its parameters: that of its call does not count."""
        call = self._call
        traceparent, tracestate = parameters.get(TRACEPARENT), parameters.get(TRACESTATE, "")
        call.context = str(traceparent), str(tracestate)
        call.span = None
        if self._endpoint.spans.on:
            self._endpoint.spans.begin(call)

    def decoded(self) -> None:
        """The request has been decoded, since the start or `received`."""
        self._codec_seconds += perf_counter() - self._lap

    def answered(self) -> None:
        """There is an answer to encode."""
        self._lap = perf_counter()

    def sent(self, size: int) -> None:
        """`size` bytes are on their way; of an answer of a stream nobody measures how long they took to encode."""
        self._bytes_out += size

    def encoded(self, size: int) -> None:
        """The answer has been encoded into `size` bytes, since `answered`."""
        self._codec_seconds += perf_counter() - self._lap
        self._bytes_out += size

    def end(self, code: Code, refusal: str = "") -> None:
        """The call is over; where it went well, `Call.outcome` is what counts. `refusal`: see `refusal_of`."""
        endpoint, call = self._endpoint, self._call
        if code is Code.CANCELLED and (remaining := call.remaining) is not None and remaining < DEADLINE_SLACK:
            # gRPC ends both in the same way, and who gave up because it took too long is told so.
            code = Code.DEADLINE_EXCEEDED
        if call.times.runs_since:
            call.times.ended()  # The model has not said so: its caller has left before.
        code = code or call.outcome
        now = perf_counter()
        seconds = now - self._started
        endpoint.in_flight -= 1
        if call.span is not None:
            endpoint.spans.end(call, endpoint, code, self._started, now)
        endpoint.record(call, code, seconds, self._codec_seconds, self._bytes_in, self._bytes_out)
        if endpoint.access_log.on and not endpoint.internal:
            names = endpoint.protocol, endpoint.entrypoint, endpoint.method
            endpoint.access_log.line(AccessLine(*names, call, code, seconds, self._bytes_in, self._bytes_out))
        if refusal or call.permission is not EVERYTHING:
            kind = call.permission.group, call.operation, code
            endpoint.clients[kind] = endpoint.clients.get(kind, 0) + 1
            if refusal:
                endpoint.refusals[kind] = endpoint.refusals.get(kind, 0) + 1
        if endpoint.audit_log.on and (refusal or call.operation in ADMINISTRATION):
            names = endpoint.protocol, endpoint.entrypoint, endpoint.method
            endpoint.audit_log.line(*names, call, code, refusal)
