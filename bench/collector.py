"""A collector of OpenTelemetry spans over gRPC that counts them: `python -m bench.collector --port PORT`.

It may be slow on purpose, and uses hardly any CPU: it only counts spans. It writes the count to a file after each
request, which is whole whenever the collector is killed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


def spans_in(request: bytes) -> int:
    """Return the number of spans in an ExportTraceServiceRequest."""
    message = ExportTraceServiceRequest.FromString(request)
    return sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)


def main(words: Sequence[str] | None = None) -> int:
    """Collect until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.collector", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each request takes")
    parser.add_argument("--count-file", type=Path, required=True, help="file for the number of spans")
    arguments = parser.parse_args(words)
    exported_spans = 0
    new = arguments.count_file.with_suffix(".new")

    def export(request: bytes, _: grpc.ServicerContext) -> bytes:
        nonlocal exported_spans
        time.sleep(arguments.delay)  # Makes it slow on purpose.
        exported_spans += spans_in(request)
        new.write_text(str(exported_spans))
        new.replace(arguments.count_file)
        return b""

    # One thread: the count needs no lock.
    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    server.start()
    server.wait_for_termination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
