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

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
RESOURCE_SPANS, SCOPE_SPANS, SPANS = 1, 2, 2
"""Numbers of the fields on the way to a span."""


def spans_in(request: bytes) -> int:
    """How many spans an ExportTraceServiceRequest has."""
    return sum(
        number == SPANS
        for resource in _messages(request, RESOURCE_SPANS)
        for scope in _messages(resource, SCOPE_SPANS)
        for number, _ in _fields(scope)
    )


def _messages(message: bytes, wanted: int) -> list[bytes]:
    return [value for number, value in _fields(message) if number == wanted]


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Those that are delimited by their length, as all here are."""
    fields, at = [], 0
    while at < len(message):
        tag, at = _varint(message, at)
        size, at = _varint(message, at)
        fields.append((tag >> 3, message[at : at + size]))
        at += size
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


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
