"""Which calls have spans, and what these say. On the event loop, but for the spans of batches that begin.

Calls that run models have spans; probes, scrapes and questions about models have none. A sampled call has a SERVER
span or, where a model makes it, an INTERNAL one; below it the time in the queue and on the model. Times are those
that the call measures for the metrics, so a span is made of them when the call ends. Requests that are executed as
one batch share one more span, which links to each of theirs; it belongs to the trace of the first of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from triglot.core.call import Call
from triglot.core.call_times import CallTimes
from triglot.core.errors import Code
from triglot.core.operation import Operation
from triglot.core.trace_context import MAX_TRACESTATE, NO_CONTEXT, flags_of, is_valid
from triglot.telemetry.spans.exporter import Exporter
from triglot.telemetry.spans.otlp import (
    ERROR,
    HAS_IS_REMOTE,
    INTERNAL,
    IS_REMOTE,
    SAMPLED,
    SERVER,
    Value,
    attributes,
    constant,
    link,
    span,
    text_field,
)

ERRORS = frozenset(
    (
        Code.UNKNOWN,
        Code.DEADLINE_EXCEEDED,
        Code.UNIMPLEMENTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    )
)
"""Codes that are the server's errors (semantic conventions for gRPC)."""
SHORT_ID = 256
"""Characters of a request's id that are kept."""
OFFSET_SECONDS = 1.0
"""How long the difference between the clocks is used."""
MOST_LINKS = 128
"""Members that a batch's span links to (OTEL_SPAN_LINK_COUNT_LIMIT's default)."""

_REMOTE = SAMPLED | HAS_IS_REMOTE | IS_REMOTE
_LOCAL = SAMPLED | HAS_IS_REMOTE

Sample = Callable[[int | None, int], bool]
"""Whether a trace is recorded: by the parent's flags, None without a parent, and the trace's id."""


def sampler(*, by_parent: bool, ratio: float) -> Sample:
    """OpenTelemetry's samplers: see `SpanSettings`."""
    bound = round(ratio * 2**64)

    def sample(flags: int | None, trace_id: int) -> bool:
        if by_parent and flags is not None:
            return bool(flags & 1)
        return trace_id & 0xFFFF_FFFF_FFFF_FFFF < bound

    return sample


class Endpoint(Protocol):
    """What is called. `rpc`: over gRPC, the method's full name."""

    @property
    def protocol(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def rpc(self) -> str: ...

    @property
    def internal(self) -> bool: ...


@dataclass(slots=True)
class HttpCircumstances:
    """What the span of a REST call says of it. `route` is a template of paths; `path` has no query; `status` is 0
    until there is a response."""

    verb: str
    route: str
    path: str
    status: int = 0


class CallSpan:
    """The span of a call that has not ended, and what its children need to know."""

    __slots__ = ("_recorder", "batch", "flags", "http", "number", "parent_id", "state", "times", "trace_id")

    def __init__(
        self,
        recorder: SpanRecorder,
        times: CallTimes,
        trace_id: bytes,
        parent_id: bytes = b"",
        flags: int = SAMPLED,
        state: str = "",
    ) -> None:
        self._recorder = recorder
        self.times = times
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.flags = flags
        self.state = state
        # Three spans: the last two bits tell them apart, and none is 0.
        self.number = random.getrandbits(62) << 2
        self.batch: BatchSpan | None = None
        self.http: HttpCircumstances | None = None

    @property
    def span_id(self) -> bytes:
        """Of the call itself."""
        return (self.number | 3).to_bytes(8)

    @property
    def child_parent_id(self) -> bytes:
        """What is the parent of spans on its behalf: its time on the model, once that has begun."""
        return (self.number | (1 if self.times.began else 3)).to_bytes(8)

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace_id.hex()}-{self.child_parent_id.hex()}-01"

    @property
    def response_traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"

    def begin_http(self, verb: str, route: str, path: str) -> None:
        """See `Span`."""
        self.http = HttpCircumstances(verb, route, path)

    def end_http(self, status: int) -> None:
        """See `Span`."""
        if self.http is not None:
            self.http.status = status

    def begin_batch(self, spans: Sequence[CallSpan]) -> BatchSpan:
        """See `Span`. May run on any thread."""
        batch = BatchSpan(self._recorder, self, spans)
        for one in spans:
            one.batch = batch
        return batch


class BatchSpan:
    """The span of a batch that has not ended."""

    __slots__ = ("_links", "_parent_id", "_recorder", "batch", "id", "state", "trace_id")

    def __init__(self, recorder: SpanRecorder, first: CallSpan, spans: Sequence[CallSpan]) -> None:
        self._recorder = recorder
        self._parent_id = first.span_id
        self._links = b"".join([link(one.trace_id, one.span_id) for one in spans[:MOST_LINKS]])
        self.trace_id = first.trace_id
        self.state = first.state
        self.id = random.getrandbits(64).to_bytes(8)
        self.batch = None

    @property
    def child_parent_id(self) -> bytes:
        """What is the parent of spans on its behalf."""
        return self.id

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace_id.hex()}-{self.id.hex()}-01"

    response_traceparent = traceparent

    def end(self, model: str, version: int, began: float, ended: float, size: int, rows: int) -> None:
        """On the loop: so many requests, of so many inferences, were executed between these instants."""
        recorder = self._recorder
        named = constant("batch", INTERNAL, *_of_model(model, version))
        counts = attributes((("triglot.batch.size", size), ("triglot.batch.rows", rows)))
        rest = named + counts + self._links
        start, end = recorder.nanoseconds(began), recorder.nanoseconds(ended)
        recorder.put(span(self.trace_id, self.id, self._parent_id, rest, start, end, _LOCAL), 1)


class SpanRecorder:
    """Begins and ends the spans of calls, as `sample` decides; `on`: whether any call may have one.

    Made off; `start` turns it on.
    """

    def __init__(self) -> None:
        self.on = False
        self.exporter: Exporter | None = None
        self._sample: Sample = sampler(by_parent=True, ratio=1.0)
        self._propagate = True
        self._scheme = "http"
        self._offset = self._offset_until = 0.0
        self._offset_ns = 0

    def start(
        self, exporter: Exporter, sample: Sample, *, propagate: bool = True, scheme: str = "http", on: bool = True
    ) -> None:
        """Record from now on. `propagate`: whether clients' trace contexts count; `scheme`: of REST's URLs."""
        self.exporter = exporter
        self._sample = sample
        self._propagate = propagate
        self._scheme = scheme
        self.on = on

    def begin(self, call: Call, *, internal: bool = False) -> None:
        """The call begins: it gets its `span`, or none. `internal`: a model makes it."""
        on_behalf_of = call.span
        if on_behalf_of is not None:
            call.span = CallSpan(
                self,
                call.times,
                on_behalf_of.trace_id,
                on_behalf_of.child_parent_id,
                _LOCAL,
                on_behalf_of.state,
            )
        elif not internal and call.operation is Operation.INFER:
            self.begin_received(call, *(call.received_context if self._propagate else NO_CONTEXT))

    def begin_received(self, call: Call, traceparent: str, tracestate: str) -> None:
        """As `begin`, with what the client has sent, valid or not."""
        if not traceparent or not is_valid(traceparent):
            number = random.getrandbits(128) or 1
            if self._sample(None, number):
                call.span = CallSpan(self, call.times, number.to_bytes(16))
            return
        if self._sample(flags_of(traceparent), int(traceparent[3:35], 16)):
            trace_id, parent_id = bytes.fromhex(traceparent[3:35]), bytes.fromhex(traceparent[36:52])
            state = tracestate if len(tracestate) <= MAX_TRACESTATE else ""
            call.span = CallSpan(self, call.times, trace_id, parent_id, _REMOTE, state)

    def end(self, call: Call, endpoint: Endpoint, code: Code, started: float, ended: float) -> None:
        """The call, which has a span, was received and over at these instants of `time.perf_counter`."""
        own, exporter, times = call.span, self.exporter, call.times
        if not isinstance(own, CallSpan) or own.times is not times or exporter is None:
            return  # It is that of the call on whose behalf this one was made.
        count = 1 + bool(times.queued) + bool(times.began)
        if exporter.is_full:
            exporter.counts.queue_full += count
            return
        described = self._described(call, own, endpoint, code)
        start_ns, end_ns = self.nanoseconds(started), self.nanoseconds(ended)
        spans = span(own.trace_id, own.span_id, own.parent_id, described, start_ns, end_ns, own.flags)
        if times.queued:
            spans += self._queue_span(own, started, ended)
        if times.began:
            spans += self._compute_span(call, own, started, ended)
        exporter.put(spans, count)

    def _queue_span(self, own: CallSpan, started: float, ended: float) -> bytes:
        times = own.times
        left = min(times.began or ended, ended)
        entered = max(started, left - times.queue_seconds if times.began else min(times.queued, ended))
        start, end = self.nanoseconds(min(entered, left)), self.nanoseconds(left)
        span_id = (own.number | 2).to_bytes(8)
        return span(own.trace_id, span_id, own.span_id, _QUEUE, start, end, _LOCAL)

    def _compute_span(self, call: Call, own: CallSpan, started: float, ended: float) -> bytes:
        times = own.times
        # What was done to the inputs before they waited is no part of it.
        joining = max(0.0, times.input_seconds - max(0.0, times.began - times.queue_seconds - started))
        done = min(ended, times.began + joining + times.compute_seconds + times.output_seconds)
        rest = _compute(call.model_name, call.model_version)
        if own.batch is not None:
            rest += link(own.batch.trace_id, own.batch.id)
        span_id = (own.number | 1).to_bytes(8)
        start, end = self.nanoseconds(min(times.began, ended)), self.nanoseconds(done)
        return span(own.trace_id, span_id, own.span_id, rest, start, end, _LOCAL)

    def _described(self, call: Call, own: CallSpan, endpoint: Endpoint, code: Code) -> bytes:
        """Name, kind, attributes, status and state of the call's span."""
        model = _of_model(call.model_name, call.model_version)
        http = own.http
        if endpoint.internal:
            failed = code is not Code.OK
            described = constant(f"{endpoint.method} {call.model_name}", INTERNAL, *model, *_error(code, failed))
        elif http is not None:
            failed = http.status >= 500 or not http.status
            described = constant(
                f"{http.verb} {http.route}",
                SERVER,
                ("http.request.method", http.verb),
                ("http.route", http.route),
                ("http.response.status_code", http.status),
                ("url.scheme", self._scheme),
                ("triglot.protocol", endpoint.protocol),
                ("triglot.code", code.name),
                *model,
                *_error(str(http.status) if http.status else code, failed),
            ) + attributes((("url.path", http.path),))
        else:
            failed = code in ERRORS
            described = _of_rpc(endpoint.rpc, endpoint.protocol, code, *model)
        if call.peer:
            described += _address(call.peer)
        if call.client:
            described += _client(call.client)
        if call.request_id:
            described += attributes((("triglot.request.id", call.request_id[:SHORT_ID]),))
        if own.state:
            described += text_field(3, own.state)
        return described + ERROR if failed else described

    def put(self, spans: bytes, count: int) -> None:
        """Have them exported."""
        if self.exporter is not None:
            self.exporter.put(spans, count)

    def nanoseconds(self, instant: float) -> int:
        """Since the epoch, of an instant of `time.perf_counter`."""
        if instant > self._offset_until:
            self._set_offset()
        return int(instant * 1e9) + self._offset_ns

    def _set_offset(self) -> None:
        now = time.perf_counter()
        self._offset_ns = time.time_ns() - int(now * 1e9)
        self._offset_until = now + OFFSET_SECONDS

    def close(self) -> None:
        """Record no more, and have what waits exported; blocks for a few seconds at most."""
        self.on = False
        if self.exporter is not None:
            self.exporter.close()


_QUEUE = constant("queue", INTERNAL)


@lru_cache(maxsize=1024)
def _of_model(name: str, version: int) -> tuple[tuple[str, Value], ...]:
    named: list[tuple[str, Value]] = [("triglot.model.name", name)] if name else []
    if version:
        named.append(("triglot.model.version", version))
    return tuple(named)


@lru_cache(maxsize=1024)
def _compute(name: str, version: int) -> bytes:
    return constant("compute", INTERNAL, *_of_model(name, version))


@lru_cache(maxsize=4096)
def _of_rpc(method: str, protocol: str, code: Code, *model: tuple[str, Value]) -> bytes:
    return constant(
        method,
        SERVER,
        ("rpc.system.name", "grpc"),
        ("rpc.method", method),
        ("rpc.response.status_code", code.name),
        ("triglot.protocol", protocol),
        *model,
        *_error(code, code in ERRORS),
    )


def _error(code: Code | str, failed: bool) -> tuple[tuple[str, Value], ...]:
    return (("error.type", code if isinstance(code, str) else code.name),) if failed else ()


@lru_cache(maxsize=1024)
def _address(peer: str) -> bytes:
    return attributes((("client.address", peer),))


@lru_cache(maxsize=1024)
def _client(name: str) -> bytes:
    return attributes((("triglot.client", name),))
