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
from triglot.core.trace_context import MAX_TRACESTATE, NO_CONTEXT, is_sampled, is_valid
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
    parent_field,
    span,
    text_attribute,
    text_field,
    trace_field,
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
LONGEST_NAME = 128
"""Characters of a model's name, which may be a client's invention."""
OFFSET_SECONDS = 1.0
"""How long the difference between the clocks is used."""
MOST_LINKS = 128
"""Members that a batch's span links to (OTEL_SPAN_LINK_COUNT_LIMIT's default)."""

_REMOTE = SAMPLED | HAS_IS_REMOTE | IS_REMOTE
_LOCAL = SAMPLED | HAS_IS_REMOTE

SampleRoot = Callable[[int], bool]
"""Whether a trace with this id, which begins here, is recorded."""


def of_ratio(ratio: float) -> SampleRoot:
    """This share of all traces, as every server decides that samples by the id."""
    bound = round(ratio * 2**64)
    return lambda trace_id: trace_id & 0xFFFF_FFFF_FFFF_FFFF < bound


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

    __slots__ = ("_id", "_recorder", "batch", "flags", "http", "parent_id", "state", "times", "trace_id")

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
        # A call has three spans, which the last byte tells apart.
        self._id = random.getrandbits(56).to_bytes(7)
        self.batch: BatchSpan | None = None
        self.http: HttpCircumstances | None = None

    @property
    def span_id(self) -> bytes:
        """Of the call itself."""
        return self._id + b"\x01"

    @property
    def queue_id(self) -> bytes:
        """Of its time in the queue."""
        return self._id + b"\x02"

    @property
    def compute_id(self) -> bytes:
        """Of its time on the model."""
        return self._id + b"\x03"

    @property
    def child_parent_id(self) -> bytes:
        """What is the parent of spans on its behalf: its time on the model, once that has begun."""
        return self.compute_id if self.times.began else self.span_id

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
        named = constant("batch", INTERNAL, *_model(model, version))
        counts = attributes((("triglot.batch.size", size), ("triglot.batch.rows", rows)))
        rest = named + counts + self._links
        start, end = recorder.nanoseconds(began), recorder.nanoseconds(ended)
        parent = parent_field(self._parent_id)
        recorder.put(span(trace_field(self.trace_id), self.id, parent, rest, start, end, _LOCAL), 1)


class SpanRecorder:
    """Begins and ends the spans of calls that are sampled; `on`: whether any call may be.

    Made off; `start` turns it on.
    """

    def __init__(self) -> None:
        self.on = False
        self.exporter: Exporter | None = None
        self._by_parent = self._propagate = True
        self._sample_root = of_ratio(1.0)
        self._scheme = "http"
        self._offset_ns = 0
        self._offset_until = 0.0

    def start(
        self,
        exporter: Exporter,
        sample_root: SampleRoot,
        *,
        by_parent: bool = True,
        propagate: bool = True,
        scheme: str = "http",
        on: bool = True,
    ) -> None:
        """Record from now on. `by_parent`: a client that has decided decides; `propagate`: whether what clients
        say counts at all. `scheme`: of REST's URLs."""
        self.exporter = exporter
        self._sample_root = sample_root
        self._by_parent = by_parent
        self._propagate = propagate
        self._scheme = scheme
        self.on = on

    def begin(self, call: Call, *, internal: bool = False) -> None:
        """The call begins: it gets its `span`, or none. `internal`: a model makes it."""
        above = call.span
        if above is not None:
            call.span = CallSpan(self, call.times, above.trace_id, above.child_parent_id, _LOCAL, above.state)
        elif not internal and call.operation is _INFER:
            parent, state = (call.context or call.received_context) if self._propagate else NO_CONTEXT
            if parent and is_valid(parent):
                self._continue(call, parent, state)
            else:
                number = random.getrandbits(128) or 1
                if self._sample_root(number):
                    call.span = CallSpan(self, call.times, number.to_bytes(16))

    def _continue(self, call: Call, parent: str, state: str) -> None:
        """A trace that the client has begun; its `traceparent` is valid."""
        if self._by_parent:
            if not is_sampled(parent):
                return
        elif not self._sample_root(int(parent[3:35], 16)):
            return
        trace_id, parent_id = bytes.fromhex(parent[3:35]), bytes.fromhex(parent[36:52])
        if len(state) > MAX_TRACESTATE:
            state = ""
        call.span = CallSpan(self, call.times, trace_id, parent_id, _REMOTE, state)

    def end(self, call: Call, endpoint: Endpoint, code: Code, started: float, ended: float) -> None:
        """The call, which has a span, was received and over at these instants of `time.perf_counter`."""
        own, exporter, times = call.span, self.exporter, call.times
        if not isinstance(own, CallSpan) or own.times is not times or exporter is None:
            return  # It is that of the call on whose behalf this one was made.
        queued, began = times.queued, times.began
        count = 1 + (queued > 0.0) + (began > 0.0)
        if exporter.is_full:
            exporter.counts.queue_full += count
            return
        if ended > self._offset_until:
            self._set_offset()
        offset = self._offset_ns
        start_ns, end_ns = int(started * 1e9) + offset, int(ended * 1e9) + offset
        trace, span_id = trace_field(own.trace_id), own.span_id
        described = self._described(call, own, endpoint, code)
        spans = span(trace, span_id, parent_field(own.parent_id), described, start_ns, end_ns, own.flags)
        parent = parent_field(span_id)
        # Code on a thread may say that it began after the loop has ended the call.
        began_ns = min(int(began * 1e9) + offset, end_ns) if began else end_ns
        if queued:
            entered_ns = began_ns - int(times.queue_seconds * 1e9) if began else int(queued * 1e9) + offset
            entered_ns = min(max(entered_ns, start_ns), began_ns)
            spans += span(trace, own.queue_id, parent, _QUEUE, entered_ns, began_ns, _LOCAL)
        if began:
            # What was done to the inputs before they waited is no part of it.
            joining = times.input_seconds - max(0.0, began - times.queue_seconds - started)
            done = began + max(0.0, joining) + times.compute_seconds + times.output_seconds
            rest = _compute(call.model_name[:LONGEST_NAME], call.model_version)
            if (batch := own.batch) is not None:
                rest += link(batch.trace_id, batch.id)
            done_ns = max(began_ns, min(int(done * 1e9) + offset, end_ns))
            spans += span(trace, own.compute_id, parent, rest, began_ns, done_ns, _LOCAL)
        exporter.put(spans, count)

    def _described(self, call: Call, own: CallSpan, endpoint: Endpoint, code: Code) -> bytes:
        """Name, kind, attributes, status and state of the call's span."""
        model, version, http = call.model_name[:LONGEST_NAME], call.model_version, own.http
        who = model, version, call.peer, call.client
        if endpoint.internal:
            described = _of_model_call(endpoint.method, code, *who)
        elif http is not None:
            described = _of_http(http.verb, http.route, http.status, self._scheme, endpoint.protocol, code, *who)
            described += _path(http.path)
        else:
            described = _of_rpc(endpoint.rpc, endpoint.protocol, code, *who)
        if call.request_id:
            described += _request_id(call.request_id)
        return described + text_field(3, own.state) if own.state else described

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


_INFER = Operation.INFER
_QUEUE = constant("queue", INTERNAL)
_request_id, _path = text_attribute("triglot.request.id"), text_attribute("url.path")
Pairs = tuple[tuple[str, Value], ...]


# What is the same from call to call is encoded once.


@lru_cache(maxsize=1024)
def _compute(name: str, version: int) -> bytes:
    return constant("compute", INTERNAL, *_model(name, version))


@lru_cache(maxsize=4096)
def _of_model_call(method: str, code: Code, model: str, version: int, peer: str, client: str) -> bytes:
    pairs = (*_model(model, version), *_client(peer, client))
    return _with_error(constant(f"{method} {model}", INTERNAL, *pairs), code.name if code else "")


@lru_cache(maxsize=4096)
def _of_rpc(method: str, protocol: str, code: Code, model: str, version: int, peer: str, client: str) -> bytes:
    pairs: Pairs = (
        ("rpc.system.name", "grpc"),
        ("rpc.method", method),
        ("rpc.response.status_code", code.name),
        ("triglot.protocol", protocol),
    )
    described = constant(method, SERVER, *pairs, *_model(model, version), *_client(peer, client))
    return _with_error(described, code.name if code in ERRORS else "")


@lru_cache(maxsize=4096)
def _of_http(
    verb: str,
    route: str,
    status: int,
    scheme: str,
    protocol: str,
    code: Code,
    model: str,
    version: int,
    peer: str,
    client: str,
) -> bytes:
    pairs: Pairs = (
        ("http.request.method", verb),
        ("http.route", route),
        *((("http.response.status_code", status),) if status else ()),
        ("url.scheme", scheme),
        ("triglot.protocol", protocol),
        ("triglot.code", code.name),
    )
    described = constant(f"{verb} {route}", SERVER, *pairs, *_model(model, version), *_client(peer, client))
    # Without a status the connection was gone.
    return _with_error(described, str(status) if status >= 500 else "" if status else code.name)


def _model(name: str, version: int) -> Pairs:
    named: Pairs = (("triglot.model.name", name),) if name else ()
    return (*named, ("triglot.model.version", version)) if version else named


def _client(peer: str, client: str) -> Pairs:
    address: Pairs = (("client.address", peer),) if peer else ()
    return (*address, ("triglot.client", client)) if client else address


def _with_error(described: bytes, error: str) -> bytes:
    """`error`: its type, or nothing."""
    return described + attributes((("error.type", error),)) + ERROR if error else described
