#!/bin/bash
# grpcio 1.85.1: a server refuses metadata of 8 to 16 KiB by chance, and more often the larger it is.
#
# One expects a limit: what is below it passes, what is above fails. gRPC's C core has two, and between them (by default
# 8 KiB, "soft", and 16 KiB, "hard") each call is refused with RESOURCE_EXHAUSTED at a probability that grows from 0 to 1.
# A client with a token of 11 KB works when it is tried by hand, and fails half of the time in use; retries hide it until
# the token grows. A server that sets grpc.max_metadata_size and grpc.absolute_max_metadata_size to one value has a limit.
#
# Output seen, on Python 3.11, of 200 calls that each have a header of so many bytes (the counts vary by some):
#    7000 bytes: 200 answered                 both limits 16 KiB: 200 answered
#   11500 bytes: 107 answered                 both limits 16 KiB: 200 answered
#   15000 bytes:  13 answered                 both limits 16 KiB: 200 answered
# Exits 0 while the middle sizes are answered now and then by default, and always with equal limits; 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpcio==1.85.1
cat > run.py <<'PY'
from concurrent import futures

import grpc

CALLS = 200
EQUAL = [("grpc.max_metadata_size", 16384), ("grpc.absolute_max_metadata_size", 16384)]


def answered(options, size):
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(futures.ThreadPoolExecutor(2), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    count = 0
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_retries", 0)]) as channel:
        call = channel.unary_unary("/echo.Echo/Echo")
        for _ in range(CALLS):
            try:
                call(b"x", timeout=30, metadata=(("x-token", "t" * size),))
                count += 1
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
    server.stop(0).wait()
    return count


found = []
for size in (7000, 11500, 15000):
    found.append((answered([], size), answered(EQUAL, size)))
    print(f"{size:6} bytes: {found[-1][0]:3} answered                 both limits 16 KiB: {found[-1][1]:3} answered")
small, middle, large = (by_default for by_default, _ in found)
equal = [count for _, count in found] == [CALLS] * 3
raise SystemExit(not (small == CALLS > middle > large > 0 and equal))
PY
venv/bin/python run.py 2> errors.txt
