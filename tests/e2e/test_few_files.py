"""A server whose process may have few files: idle connections leave it those that it needs itself."""

from __future__ import annotations

import http.client
import json
import resource
import select
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import grpc
import pytest

from tests.process import SECONDS, Triglot, write_model
from tests.protocol_clients.channel import SERVICE
from tests.waiting import wait_until
from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.http2.core import frames

FILES = 256
FEW = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))"
FEW_AT_FIRST = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {2 * FILES}))"
MODEL = """
import triglot

class Twice(triglot.Model):
    execution = "process"
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    def infer(self, inputs):
        return {"y": 2 * inputs["x"]}
"""
IDLE = 8
"""Connections for which the process has files left."""
ARGUMENTS = ("--grpc-port", "0", "--rest-port", "0", "--model-control-mode", "explicit", "--drain-delay", "0")


def open_too_many(port: int, kept: ExitStack, greeting: bytes = b"") -> None:
    """Open connections to a port that stay idle, and wait until some have been closed."""
    closed = select.poll()
    for _ in range(FILES):
        connection = kept.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
        with suppress(ConnectionError):
            connection.sendall(greeting)
        closed.register(connection, select.POLLRDHUP)
    assert closed.poll(1000 * SECONDS), f"{FILES} connections were taken"


class Kept:
    """A connection to REST that is there before all others."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        """GET, or POST where there is a body."""
        data = None if body is None else json.dumps(body).encode()
        self._connection.request("GET" if body is None else "POST", path, data)
        with self._connection.getresponse() as answer:
            return answer.status, answer.read()


def is_taken(rest_port: int) -> bool:
    try:
        with Kept(rest_port) as rest:
            return rest.ask("/v2/health/live")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def is_live(channel: grpc.Channel) -> bool:
    live = channel.unary_unary(SERVICE + "ServerLive", response_deserializer=pb.ServerLiveResponse.FromString)
    try:
        return bool(live(b"", timeout=SECONDS).live)
    except grpc.RpcError:
        return False


@pytest.mark.parametrize(
    "transport", ["h2", pytest.param("aio", marks=pytest.mark.newest)]
)  # grpcio before 1.69 bounds no connections.
def test_idle_connections_leave_files(tmp_path: Path, transport: str) -> None:
    write_model(tmp_path / "models" / "twice", MODEL)
    with Triglot(tmp_path / "models", *ARGUMENTS, "--grpc-transport", transport, before=FEW) as server:
        grpc_port, rest_port = server.ports()
        with ExitStack() as kept:
            rest = kept.enter_context(Kept(rest_port))
            assert rest.ask("/v2/health/live")[0] == 200
            open_too_many(grpc_port, kept, frames.PREFACE + frames.settings({}))
            open_too_many(rest_port, kept)
            assert rest.ask("/v2/repository/models/twice/load", {})[0] == 200
            tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [7]}
            status, answer = rest.ask("/v2/models/twice/infer", {"inputs": [tensor]})
            assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [14])
            assert rest.ask("/metrics")[0] == 200
        wait_until(lambda: is_taken(rest_port))
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            wait_until(lambda: is_live(channel))
        assert "Too many open files" not in server.stderr.text()


@pytest.mark.parametrize("http_transport", ["h1", "aiohttp"])
def test_idle_connections_of_either_port_make_room_for_calls_on_the_other(
    tmp_path: Path, http_transport: str
) -> None:
    arguments = (*ARGUMENTS, "--grpc-transport", "h2", "--http-transport", http_transport)
    own_pool = [("grpc.use_local_subchannel_pool", 1)]
    with Triglot(tmp_path, *arguments) as server, ExitStack() as kept:
        grpc_port, rest_port = server.ports()
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=own_pool) as channel:
            assert is_live(channel)
        limit = len([*Path(f"/proc/{server.pid}/fd").iterdir()]) + IDLE
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(2):
            for _ in range(IDLE):
                assert kept.enter_context(Kept(rest_port)).ask("/v2/health/live")[0] == 200
            channels = [
                kept.enter_context(grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=own_pool))
                for _ in range(IDLE)
            ]
            for _ in range(2):  # Those that made room for the last ones connect again.
                assert all(map(is_live, channels))
        assert "Too many open files" in server.stderr.text()


def test_metrics_are_served_when_no_file_can_be_opened(tmp_path: Path) -> None:
    with Triglot(tmp_path, *ARGUMENTS) as server, Kept(server.ports()[1]) as rest:

        def seconds() -> float:
            return float(json.loads(rest.ask("/grps/v1/monitor/overview")[1])["server"]["uptime_seconds"])

        assert rest.ask("/metrics")[0] == 200
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (0, hard))
        later = seconds() + 2
        wait_until(lambda: seconds() > later)
        status, page = rest.ask("/metrics")
        assert status == 200
        assert b"\nnv_cpu_memory_used_bytes " in page
        assert "Too many open files" not in server.stderr.text()


def test_the_server_takes_the_files_that_it_may_have(tmp_path: Path) -> None:
    with Triglot(tmp_path, *ARGUMENTS, before=FEW_AT_FIRST) as server:
        server.ports()
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (2 * FILES, 2 * FILES)
