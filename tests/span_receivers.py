"""Collectors of OpenTelemetry spans over gRPC and HTTP, which decode with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.process import SECONDS

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SERVER, INTERNAL = Message.SPAN_KIND_SERVER, Message.SPAN_KIND_INTERNAL


@dataclass(frozen=True)
class Span:
    """A received span. `start` and `end` are nanoseconds since the epoch; ids are in hex."""

    name: str
    kind: int
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    is_error: bool
    state: str
    flags: int
    resource: dict[str, Any]

    @property
    def code(self) -> str:
        """Status code of a gRPC call, or else the attribute `triglot.code`."""
        return str(self.attributes.get("rpc.response.status_code") or self.attributes.get("triglot.code"))


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def spans_of(data: bytes) -> list[Span]:
    """Return the spans of an encoded ExportTraceServiceRequest."""
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
    found = []
    for of_resource in request.resource_spans:
        resource = {attribute.key: _value(attribute.value) for attribute in of_resource.resource.attributes}
        for scope in of_resource.scope_spans:
            assert scope.scope.name == "triglot"
            for span in scope.spans:
                assert len(span.trace_id) == 16
                assert len(span.span_id) == 8
                assert len(span.parent_span_id) in (0, 8)
                assert span.start_time_unix_nano <= span.end_time_unix_nano
                attributes = {pair.key: _value(pair.value) for pair in span.attributes}
                assert len(attributes) == len(span.attributes)
                found.append(
                    Span(
                        span.name,
                        span.kind,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        attributes,
                        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                        span.status.code == Status.STATUS_CODE_ERROR,
                        span.trace_state,
                        span.flags,
                        resource,
                    )
                )
    return found


@dataclass
class Received:
    """The state of a collector: what it received, and how it responds.

    `headers` are those of its last request, `requests` counts all. While `gate` is cleared, requests wait.
    `refuse` is the status that requests fail with, None for success; `rejects` the number of spans that responses
    report as rejected.
    """

    spans: list[Span] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    refuse: Any = None
    rejects: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def add(self, data: bytes, headers: dict[str, str]) -> None:
        """Record a request, once `gate` is set. Called on the collector's threads."""
        assert self.gate.wait(SECONDS)
        spans = spans_of(data)
        with self._changed:
            self.requests += 1
            self.headers = headers
            if self.refuse is None:
                self.spans += spans
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Span]:
        """Wait until at least `count` spans were received; returns all of them. Blocks."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, SECONDS), self.spans
            return list(self.spans)

    def wait_for_request(self, number: int) -> None:
        """Wait until `number` requests were received, including refused ones. Blocks."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.requests >= number, SECONDS)

    @property
    def response(self) -> bytes:
        """Encoded response to a request."""
        message = trace_service_pb2.ExportTraceServiceResponse()
        if self.rejects:
            message.partial_success.rejected_spans = self.rejects
            message.partial_success.error_message = "not these"
        return message.SerializeToString()


@contextmanager
def grpc_receiver(port: int = 0) -> Iterator[tuple[str, Received]]:
    """Run a collector for OTLP/gRPC; yields its URL and state. `refuse` may be a `grpc.StatusCode`."""
    received = Received()

    def export(data: bytes, context: grpc.ServicerContext) -> bytes:
        received.add(data, {str(name): str(value) for name, value in context.invocation_metadata()})
        if received.refuse is not None:
            context.abort(received.refuse, "not now")
        return received.response

    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = EXPORT.split("/")[1]
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        received.gate.set()
        server.stop(None).wait()


@contextmanager
def http_receiver() -> Iterator[tuple[str, Received]]:
    """Run a collector for OTLP/HTTP; yields its URL, without a path, and state. `refuse` may be an HTTP status."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer as a login page does, to which a redirect leads."""
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.add(body, {name.lower(): value for name, value in self.headers.items()})
            answer = received.response
            self.send_response(received.refuse or 200)
            if received.refuse in (301, 302, 303, 307, 308):
                self.send_header("Location", "/login")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        received.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def now() -> int:
    """Return the time in nanoseconds since the epoch."""
    return time.time_ns()
