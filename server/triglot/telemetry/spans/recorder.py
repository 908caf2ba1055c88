"""Samples calls and records their spans. Runs on the event loop, except that batch spans may begin on any thread.

Inference calls have spans; health probes, scrapes of metrics, and calls for metadata have none. A sampled call has
a SERVER span or, if a model makes the call, an INTERNAL one; its children are the time in the queue and the time
on the model. The times are those that the call measures for the metrics, so its spans are made when the call ends.
Requests that are executed as one batch share one more span, which links to the span of each; it belongs to the
trace of the first of them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from triglot.config.trace_config import OPENTELEMETRY, TraceConfig
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import Operation
from triglot.core.statistics import CallTimes
from triglot.core.trace_context import MAX_TRACESTATE, NO_CONTEXT, is_sampled, is_valid
from triglot.telemetry.calls import Counter, Endpoint, Observer
from triglot.telemetry.spans.exporter import Exporter, exporter_of
from triglot.telemetry.spans.otlp import (
    ERROR,
    INTERNAL,
    SERVER,
    Value,
    attributes,
    constant,
    link,
    text_field,
)
from triglot.telemetry.spans.rows import CALL, COMPUTE, HAS_IS_REMOTE, IS_REMOTE, LOCAL, SAMPLED
from triglot.telemetry.spans.settings import SpanSettings, settings_of, trace_config_settings

log = logging.getLogger(__name__)

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
"""Status codes that are errors of the server (semantic conventions for gRPC)."""
MAX_NAME, MAX_ID, MAX_PATH, MAX_VERB = 128, 256, 256, 16
"""Most characters kept of a model's name, a request's id, a path and a method: clients may send arbitrary ones."""
MAX_CACHED = 192
"""Encoded attributes that are cached, of each kind."""
MAX_LINKS = 128
"""Most requests that a batch's span links to (the default of OTEL_SPAN_LINK_COUNT_LIMIT)."""

_NOT_EXECUTED, _EXECUTED = CallTimes(), CallTimes()
_EXECUTED.began = 1.0
_REMOTE = SAMPLED | HAS_IS_REMOTE | IS_REMOTE
_random_bits = random.getrandbits

SampleRoot = Callable[[int], bool]
"""Return whether a trace with this id that begins in this server is sampled."""


def of_ratio(ratio: float) -> SampleRoot:
    """Return a sampler for this share of all traces; all servers that sample by trace id choose the same ones."""
    bound = round(ratio * 2**64)
    return lambda trace_id: trace_id & 0xFFFF_FFFF_FFFF_FFFF < bound


@dataclass(slots=True)
class HttpCircumstances:
    """The HTTP request, for attributes of a REST call's span.

    `route` is the path template; `path` has no query; `status` is 0 until there is a response.
    """

    verb: str
    route: str
    path: str
    status: int = 0


class CallSpan:
    """The span of a call in progress, with the context for its children. Implements `Span`.

    `trace` and `parent` are the ids of its trace and its parent span in hex; `parent` is "" for a root span. A
    call has up to three spans, whose ids differ in the last two bits only.
    """

    __slots__ = ("_recorder", "batch", "flags", "http", "id", "parent", "state", "times", "trace")

    def __init__(
        self, recorder: SpanRecorder, times: CallTimes, trace: str, parent: str, flags: int, state: str
    ) -> None:
        self._recorder = recorder
        self.times = times
        self.trace = trace
        self.parent = parent
        self.flags = flags
        self.state = state
        self.id = _random_bits(62) << 2 | CALL
        self.batch: BatchSpan | None = None
        self.http: HttpCircumstances | None = None

    @property
    def child_parent(self) -> int:
        """Parent id of spans on behalf of this call: its COMPUTE span's once the model has begun."""
        return self.id ^ CALL ^ COMPUTE if self.times.began else self.id

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace}-{self.child_parent:016x}-01"

    @property
    def response_traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace}-{self.id:016x}-01"

    def begin_http(self, verb: str, route: str, path: str) -> None:
        """See `Span`."""
        self.http = HttpCircumstances(verb[:MAX_VERB], route, path[:MAX_PATH])

    def end_http(self, status: int) -> None:
        """See `Span`."""
        if self.http is not None:
            self.http.status = status

    def begin_batch(self, spans: Sequence[CallSpan]) -> BatchSpan:
        """See `Span`. May run on any thread."""
        batch = BatchSpan(self._recorder, self, spans)
        for span in spans:
            span.batch = batch
        return batch


class BatchSpan:
    """The span of a batch in progress. `first` is the span of its first request, `spans` those of all."""

    __slots__ = ("_links", "_parent", "_recorder", "batch", "id", "link", "state", "trace")

    def __init__(self, recorder: SpanRecorder, first: CallSpan, spans: Sequence[CallSpan]) -> None:
        self._recorder = recorder
        self._parent = f"{first.id:016x}"
        self._links = b"".join([link(span.trace, span.id) for span in spans[:MAX_LINKS]])
        self.trace = first.trace
        self.state = first.state
        self.id = _random_bits(62) << 2 | CALL
        self.link = link(self.trace, self.id)
        """Encoded link from the spans of its requests to this one."""
        self.batch = None

    @property
    def child_parent(self) -> int:
        """Parent id of spans on behalf of this batch."""
        return self.id

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace}-{self.id:016x}-01"

    response_traceparent = traceparent

    def end(self, model: str, version: int, began: float, end_time: float, size: int, rows: int) -> None:
        """Record the batch of `size` requests with `rows` rows. On the event loop.

        `began` and `end_time` are instants of `time.perf_counter`.
        """
        named = _on_model("batch", model, version)
        counts = attributes((("triglot.batch.size", size), ("triglot.batch.rows", rows)))
        rest = named + counts + self._links
        ids = self.trace, self._parent, self.id, LOCAL
        row = rest, b"", b"", b"", *ids, began, end_time, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1
        self._recorder.exporter.put(row)


class SpanRecorder(Observer):
    """Begins and ends the spans of sampled calls. `on`: whether calls are sampled at all.

    `by_parent`: the sampled flag of a client's `traceparent` decides, where there is one; else `sample_root`
    does. `propagate`: whether clients' `traceparent` and `tracestate` are read at all. `scheme`: the scheme of
    REST URLs.
    """

    def __init__(
        self,
        exporter: Exporter,
        sample_root: SampleRoot,
        *,
        by_parent: bool = True,
        propagate: bool = True,
        scheme: str = "http",
        on: bool = True,
    ) -> None:
        self.exporter = exporter
        self._sample_root = sample_root
        self._by_parent = by_parent
        self._propagate = propagate
        self._scheme = scheme
        self.on = on

    def switch(self, level: int) -> None:
        """See `Observer`."""
        self.on = bool(level)

    def begin(self, call: Call, endpoint: Endpoint) -> None:
        """Set the `span` of a call that begins, if it is sampled."""
        if not self.on:
            return
        above = call.span
        if above is not None:
            call.span = CallSpan(self, call, above.trace, f"{above.child_parent:016x}", LOCAL, above.state)
        elif not endpoint.internal and call.operation is _INFER:
            parent, state = (call.context or call.received_context) if self._propagate else NO_CONTEXT
            if parent and is_valid(parent):
                if is_sampled(parent) if self._by_parent else self._sample_root(int(parent[3:35], 16)):
                    if len(state) > MAX_TRACESTATE:
                        state = ""
                    call.span = CallSpan(self, call, parent[3:35], parent[36:52], _REMOTE, state)
            else:
                number = _random_bits(128) or 1
                if self._sample_root(number):
                    call.span = CallSpan(self, call, f"{number:032x}", "", SAMPLED, "")

    def end(self, call: Call, endpoint: Endpoint, code: Code, end_time: float, refusal: str) -> None:
        """Export the spans of a call that has ended, see `Observer`."""
        own = call.span
        if not isinstance(own, CallSpan) or own.times is not call:
            return  # It has none, or that of the call on whose behalf it was made.
        # The call and its span would keep each other alive.
        own.times = _EXECUTED if call.began else _NOT_EXECUTED
        request_id = call.request_id
        batch, queued, began = own.batch, call.queued, call.began
        row = (
            self._described(call, own, endpoint, code),
            request_id[:MAX_ID].encode(errors="replace") if request_id else b"",
            _on_model("compute", call.model_name[:MAX_NAME], call.model_version) if began else b"",
            batch.link if batch is not None and began else b"",
            own.trace,
            own.parent,
            own.id,
            own.flags,
            call.arrived,
            end_time,
            queued,
            began,
            call.queue_seconds,
            call.input_seconds,
            call.compute_seconds,
            call.output_seconds,
            1 + (queued > 0) + (began > 0),
        )
        self.exporter.put(row)

    def _described(self, call: Call, own: CallSpan, endpoint: Endpoint, code: Code) -> bytes:
        """Return the encoded name, kind, attributes, status and trace state of the call's own span."""
        who = call.model_name[:MAX_NAME], call.model_version, call.peer, call.client
        http = own.http
        if endpoint.internal:
            described = _of_model_call(endpoint.method, code, *who)
        elif http is not None:
            described = _of_http(http.verb, http.route, http.status, self._scheme, endpoint.protocol, code, *who)
            described += _path(http.path)
        else:
            described = _of_rpc(endpoint.rpc, endpoint.protocol, code, *who)
        return described + text_field(3, own.state) if own.state else described

    def counters(self) -> Iterator[Counter]:
        """See `Observer`."""
        counts = self.exporter.counts
        yield Counter("triglot_spans_exported", "Spans that a collector has taken.", (), [((), counts.exported)])
        lost = [((why,), getattr(counts, why)) for why in ("queue_full", "export_failed", "rejected")]
        yield Counter("triglot_spans_lost", "Spans that no collector has taken.", ("reason",), lost)

    def close(self) -> None:
        """Stop recording and export the queued spans; blocks for a few seconds at most."""
        self.on = False
        self.exporter.close()


def span_recorder(
    traces: TraceConfig, environment: Mapping[str, str], sample_span: SampleRoot, *, scheme: str, version: str
) -> SpanRecorder | None:
    """Return the recorder that Triton's trace settings or OpenTelemetry's environment variables ask for, or None.

    `sample_span` samples with Triton's settings. `version` is the server's.
    """
    settings: SpanSettings | None
    by_parent, on = True, True
    if traces.mode == OPENTELEMETRY:
        settings, problems = trace_config_settings(environment, traces.url, traces.resource, traces.batching)
        sample_root, on = sample_span, bool(traces.level)
    else:
        settings, problems = settings_of(environment)
        if settings is not None:
            sample_root, by_parent = of_ratio(settings.ratio), settings.by_parent
    for problem in problems:
        log.warning("%s", problem)
    if settings is None:
        return None
    log.info("spans are exported to %s", settings.destination)
    return SpanRecorder(
        exporter_of(settings, version),
        sample_root,
        by_parent=by_parent,
        propagate=settings.propagate,
        scheme=scheme,
        on=on,
    )


_INFER = Operation.INFER
Pairs = tuple[tuple[str, Value], ...]


# Fields that are the same for many calls are encoded once.


@lru_cache(maxsize=MAX_CACHED)
def _path(path: str) -> bytes:
    return attributes((("url.path", path),))


@lru_cache(maxsize=MAX_CACHED)
def _on_model(what: str, name: str, version: int) -> bytes:
    return constant(what, INTERNAL, *_model(name, version))


@lru_cache(maxsize=MAX_CACHED)
def _of_model_call(method: str, code: Code, model: str, version: int, peer: str, client: str) -> bytes:
    pairs = (*_model(model, version), *_client(peer, client))
    return _with_error(constant(f"{method} {model}", INTERNAL, *pairs), code.name if code else "")


@lru_cache(maxsize=MAX_CACHED)
def _of_rpc(method: str, protocol: str, code: Code, model: str, version: int, peer: str, client: str) -> bytes:
    pairs: Pairs = (
        ("rpc.system.name", "grpc"),
        ("rpc.method", method),
        ("rpc.response.status_code", code.name),
        ("triglot.protocol", protocol),
    )
    described = constant(method, SERVER, *pairs, *_model(model, version), *_client(peer, client))
    return _with_error(described, code.name if code in ERRORS else "")


@lru_cache(maxsize=MAX_CACHED)
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
    # Without a status, the connection was closed before the response.
    return _with_error(described, str(status) if status >= 500 else "" if status else code.name)


def _model(name: str, version: int) -> Pairs:
    named: Pairs = (("triglot.model.name", name),) if name else ()
    return (*named, ("triglot.model.version", version)) if version else named


def _client(peer: str, client: str) -> Pairs:
    address: Pairs = (("client.address", peer),) if peer else ()
    return (*address, ("triglot.client", client)) if client else address


def _with_error(described: bytes, error: str) -> bytes:
    """Return the fields with the status ERROR and the attribute `error.type`; unchanged if `error` is ""."""
    return described + attributes((("error.type", error),)) + ERROR if error else described
