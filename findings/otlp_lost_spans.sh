#!/bin/bash
# opentelemetry-exporter-otlp-proto-http and -grpc 1.45.2: spans that no collector kept are reported as exported.
#
# By OTLP's specification success is HTTP 200 or gRPC OK, and for rejected spans the response has `partial_success`, with
# their number and the reason. The HTTP exporter takes every status from 200 to 399 for success, and does not follow
# redirects: a proxy that sends clients to its login page swallows all spans. Neither exporter reads the response, so
# a collector that rejects every span does so, too. Nothing is logged.
#
# Output seen, on Python 3.11:
#   HTTP, 302 to another page:   SUCCESS, requests received: 1, log []
#   HTTP, the span is rejected:  SUCCESS, requests received: 1, log []
#   gRPC, the span is rejected:  SUCCESS, requests received: 1, log []
# Exits 0 while that is so, and 1 when one of them is a failure or is logged.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2 \
  opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-otlp-proto-grpc==1.45.2
cat > run.py <<'PY'
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

REJECTED = trace_service_pb2.ExportTraceServiceResponse()
REJECTED.partial_success.rejected_spans = 1
REJECTED.partial_success.error_message = "quota exceeded"
received = []
log = []


class Collector(BaseHTTPRequestHandler):
    status = 200

    def do_POST(self):
        received.append(self.rfile.read(int(self.headers["Content-Length"])))
        body = REJECTED.SerializeToString() if self.status == 200 else b""
        self.send_response(self.status)
        self.send_header("Location", "/login")
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Service(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, _):
        received.append(request)
        return REJECTED


class Kept(logging.Handler):
    def emit(self, record):
        log.append(record.getMessage())


def export(what, exporter):
    """Export one span; return whether that counts as success and logs nothing."""
    received.clear()
    result = exporter.export([span])
    print(f"{what:28} {result.name}, requests received: {len(received)}, log {log}")
    return result is SpanExportResult.SUCCESS and not log


logging.getLogger("opentelemetry").addHandler(Kept())
span = TracerProvider().get_tracer("finding").start_span("call")
span.end()
http = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=http.serve_forever, daemon=True).start()
server = grpc.server(ThreadPoolExecutor(1))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()

over_http = OverHttp(endpoint=f"http://127.0.0.1:{http.server_port}/v1/traces")
Collector.status = 302
as_before = export("HTTP, 302 to another page:", over_http)
Collector.status = 200
as_before &= export("HTTP, the span is rejected:", over_http)
as_before &= export("gRPC, the span is rejected:", OverGrpc(endpoint=f"http://127.0.0.1:{port}", insecure=True))
server.stop(None)
sys.exit(not as_before)
PY
venv/bin/python run.py
