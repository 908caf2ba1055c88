"""What surprises of clients, as docs/clients.md has it: refused streams, and numbers in a field of bytes."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamEnded

from tests.e2e.foreign.cases import echo
from tests.e2e.foreign.clients import CLIENTS, Client, Connection, node
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS, clean_environment

CODES = {
    "grpcio": "UNAVAILABLE",
    "grpcio 1.49": "UNAVAILABLE",
    "grpcio 1.59": "UNAVAILABLE",
    "grpclib": "StreamTerminatedError",
    "connectrpc": "OK",
    "grpc-js": "OK",
    "nice-grpc": "OK",
    "connect-node": "INTERNAL",
    "grpc-go": "OK",
    "grpc-ruby": "UNAVAILABLE",
    "grpc-c++": "UNAVAILABLE",
    "grpc-java": "OK",
}
"""What a refused call ends with, without a retry policy: OK if the client sends it again by itself."""


class Refusing(ThreadingTCPServer):
    """Refuses the first call, and responds to others with an empty message."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls = 0

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Yield the address."""
        with self:
            thread = threading.Thread(target=self.serve_forever)
            thread.start()
            yield f"127.0.0.1:{self.server_address[1]}"
            self.shutdown()
            thread.join()


class Handler(BaseRequestHandler):
    """One connection."""

    server: Refusing

    def handle(self) -> None:
        connection = H2Connection(H2Configuration(client_side=False))
        connection.initiate_connection()
        self.request.sendall(connection.data_to_send())
        while data := self.request.recv(65536):
            for event in connection.receive_data(data):
                if isinstance(event, RequestReceived):
                    self.server.calls += 1
                    if self.server.calls == 1:
                        connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
                elif isinstance(event, StreamEnded) and self.server.calls > 1:
                    headers = [(":status", "200"), ("content-type", "application/grpc")]
                    connection.send_headers(event.stream_id, headers)
                    connection.send_data(event.stream_id, bytes(5))
                    connection.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
            self.request.sendall(connection.data_to_send())


def code_and_calls(client: Client, *, retries: bool) -> tuple[str, int]:
    """Return what a call ends with, and how often it arrives."""
    refusing = Refusing()
    with refusing.serving() as address, client.calling(Connection(address, retries=retries)) as call:
        result = call(echo(1) | {"tail": 0})
    return result["code"], refusing.calls


WITH_POLICY = [client for client in CLIENTS if CODES[client.name] == "UNAVAILABLE"]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_refused_call(client: Client) -> None:
    code = CODES[client.name]
    assert code_and_calls(client, retries=False) == (code, 2 if code == "OK" else 1)


@pytest.mark.parametrize("client", WITH_POLICY, ids=lambda client: client.name)
def test_refused_call_with_a_retry_policy(client: Client) -> None:
    assert code_and_calls(client, retries=True) == ("OK", 2)


def test_float32_array_of_protobufjs_is_sent_as_one_byte_for_each_number() -> None:
    command, environment = node("float32_array.js")()
    loaded = ("--model-control-mode=explicit", "--load-model=identity_fp32")
    with ServerProcess(str(PLAIN_MODELS), *loaded) as server:
        done = subprocess.run(
            [*command, server.grpc_address],
            env=clean_environment(**environment),
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
    error, number = json.loads(done.stdout)
    assert "INVALID_ARGUMENT" in error
    assert "Expected 4, got 1" in error
    assert number == 300
