#!/bin/bash
# grpcio 1.85.1: the channel argument grpc.min_reconnect_backoff_ms sets no wait; it is the time limit of a connection.
#
# By its name and by gRPC's header it is the least time between two attempts to connect, so that with the two beside it,
# initial_ and max_, small values make a client come back soon after a server's restart. But an attempt is given up after
# this time (20 s by default; or after the time to the next attempt, if that is longer) unless the server's SETTINGS have
# come. With 100 ms the first calls to a server that is 150 ms away fail, as they do where the machine is busy, and the
# same two neighbours without it have the short waits and connect.
#
# Output seen, on Python 3.11, with a server whose bytes arrive 300 ms late:
#   initial, max:       first call: answered
#   initial, min, max:  first call: UNAVAILABLE, connection attempt timed out before receiving SETTINGS frame
# Exits 0 while that is so, and 1 when both are answered.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpcio==1.85.1
cat > run.py <<'PY'
import socket
import threading
import time
from concurrent import futures

import grpc

LATE = 0.3
WAITS = {"initial": ("grpc.initial_reconnect_backoff_ms", 100), "max": ("grpc.max_reconnect_backoff_ms", 2000)}
LIMIT = {"min": ("grpc.min_reconnect_backoff_ms", 100)}


def forward(source, target, late):
    while data := source.recv(65536):
        time.sleep(late)
        target.sendall(data)


def accept(listener, port):
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=forward, args=(client, server, 0), daemon=True).start()
        threading.Thread(target=forward, args=(server, client, LATE), daemon=True).start()


def first_call(address, options):
    with grpc.insecure_channel(address, [*options.values(), ("grpc.enable_retries", 0)]) as channel:
        try:
            return "answered" if channel.unary_unary("/echo.Echo/Echo")(b"x", timeout=30) == b"x" else "wrong"
        except grpc.RpcError as error:
            return f"{error.code().name}, {error.details().rpartition(': ')[2]}"


echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(futures.ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", {"Echo": echo}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=accept, args=(listener, port), daemon=True).start()
address = f"127.0.0.1:{listener.getsockname()[1]}"
seen = []
for options in (WAITS, {"initial": WAITS["initial"], **LIMIT, "max": WAITS["max"]}):
    seen.append(first_call(address, options))
    print(f"{', '.join(options) + ':':19} first call: {seen[-1]}", flush=True)
server.stop(0)
raise SystemExit(seen != ["answered", "UNAVAILABLE, connection attempt timed out before receiving SETTINGS frame"])
PY
venv/bin/python run.py 2> errors.txt
