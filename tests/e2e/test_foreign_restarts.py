"""Clients of different HTTP/2 libraries call while workers are replaced and connections are ended for their age.

None of them has a retry policy: they open another connection, and send again what they know did not run.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.foreign.cases import Json, echo, steps
from tests.e2e.foreign.clients import CLIENTS, MODELS, Client, Connection
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS
from tests.waiting import wait_until

NAMES = ("grpcio", "grpclib", "connectrpc", "grpc-js", "connect-node")
CALLS = {"unary": echo(1000), "stream": steps([20], ms=50)}
"""What each client calls again and again; the stream's responses take a second."""
ROUND = {"repeat_seconds": 3, "timeout_ms": 20_000}


class Load:
    """Calls of one kind by a client, in rounds; a round's result is its first call that failed, or its last."""

    def __init__(self, client: Client, kind: str) -> None:
        self.client = client
        self.kind = kind
        self.rounds: list[Json] = []

    def run(self, connection: Connection, stopping: threading.Event) -> None:
        with self.client.calling(connection) as call:
            while not stopping.is_set():
                self.rounds.append(call(CALLS[self.kind] | ROUND))

    def check(self) -> None:
        """Raise `AssertionError` if a call failed, other than by the client's limit."""
        assert sum(result["codes"].get("OK", 0) for result in self.rounds)
        limit = self.client.limits.get("connection age")
        failed = [f"{result['code']}: {result['message']}" for result in self.rounds if result["code"] != "OK"]
        unexpected = [failure for failure in failed if limit is None or limit.observed not in failure]
        assert not unexpected, f"{self.client.name}, {self.kind}"


def restart(server: ServerProcess, count: int) -> None:
    """Replace all workers; `count`: so many times since the start."""
    server.signal(signal.SIGHUP)
    wait_until(lambda: server.stderr.text().count("all workers are replaced") == count)


@pytest.mark.long
def test_no_call_fails_that_a_client_may_send_again() -> None:
    clients = [client for client in CLIENTS if client.name in NAMES]
    assert len(clients) == len(NAMES)
    for client in clients:
        client.command()
    loads = [Load(client, kind) for client in clients for kind in CALLS]
    loaded = ("--model-control-mode=explicit", "--load-model=identity_uint8,steps")
    options = (str(PLAIN_MODELS), str(MODELS), *loaded, "--workers=3", "--max-connection-age=2")
    stopping = threading.Event()
    with ServerProcess(*options) as server, ThreadPoolExecutor(len(loads)) as threads:
        runs = [threads.submit(load.run, Connection(server.grpc_address), stopping) for load in loads]
        try:
            wait_until(lambda: all(load.rounds for load in loads))
            for count in (1, 2):
                restart(server, count)
        finally:
            stopping.set()
        for run in runs:
            run.result()
    for load in loads:
        load.check()
