"""A collector of OpenTelemetry spans over gRPC that counts them: `python -m bench.collector --port PORT`.

It is slow or quick, and takes no part of a core to speak of: a span is counted, and looked at no further. What it
has counted it writes to a file, again after each request.
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
    """How many spans an ExportTraceServiceRequest has."""
    message = ExportTraceServiceRequest.FromString(request)
    return sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)


def main(words: Sequence[str] | None = None) -> int:
    """Collect until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.collector", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each request takes")
    parser.add_argument("--counted", type=Path, required=True, help="file for the number of spans")
    arguments = parser.parse_args(words)
    counted = 0

    def export(request: bytes, _: grpc.ServicerContext) -> bytes:
        nonlocal counted
        time.sleep(arguments.delay)  # Is what makes it slow.
        counted += spans_in(request)
        arguments.counted.write_text(str(counted))
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
