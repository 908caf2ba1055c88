#!/bin/bash
# grpcio 1.85.1: a call that a server refuses before it runs (RST_STREAM with REFUSED_STREAM) fails with UNAVAILABLE.
#
# gRPC's design of retries (A6) has such calls sent again once, whatever the retry policy is, as they cannot have run;
# grpc-js 1.14, grpc-go and grpc-java do that. grpcio, on gRPC's C core, does not, although retries are on by default:
# servers and proxies that shed streams or end cost calls, unless the service config has a retry policy.
#
# The server, of h2, refuses the first call, and responds to the others with an empty message.
# Output seen, on Python 3.11, x86-64:
#   by default:           UNAVAILABLE, the call arrived 1 time(s)
#   with a retry policy:  OK, the call arrived 2 time(s)
# Exits 0 while that is so, and 1 when the call succeeds by default.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpcio==1.85.1 h2==4.4.1
cat > run.py <<'PY'
import json
import socketserver
import sys
import threading

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamEnded

RETRY = {
    "maxAttempts": 2,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


class Connection(socketserver.BaseRequestHandler):
    def handle(self):
        h2 = H2Connection(H2Configuration(client_side=False))
        h2.initiate_connection()
        self.request.sendall(h2.data_to_send())
        while data := self.request.recv(65536):
            for event in h2.receive_data(data):
                if isinstance(event, RequestReceived):
                    self.server.calls += 1
                    if self.server.calls == 1:
                        h2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
                elif isinstance(event, StreamEnded) and self.server.calls > 1:
                    h2.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
                    h2.send_data(event.stream_id, bytes(5))
                    h2.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
            self.request.sendall(h2.data_to_send())


def call(config):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
        server.daemon_threads, server.calls = True, 0
        threading.Thread(target=server.serve_forever).start()
        options = [("grpc.service_config", json.dumps(config))]
        with grpc.insecure_channel(f"127.0.0.1:{server.server_address[1]}", options) as channel:
            try:
                channel.unary_unary("/t.T/Call")(b"", timeout=10)
                return "OK", server.calls
            except grpc.RpcError as error:
                return error.code().name, server.calls
            finally:
                server.shutdown()


default = call({})
print("by default:           %s, the call arrived %d time(s)" % default)
retried = call({"methodConfig": [{"name": [{}], "retryPolicy": RETRY}]})
print("with a retry policy:  %s, the call arrived %d time(s)" % retried)
sys.exit(not (default == ("UNAVAILABLE", 1) and retried == ("OK", 2)))
PY
venv/bin/python run.py 2> log || { cat log; exit 1; }
