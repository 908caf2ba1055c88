"""The log of a server that is attacked, or whose disk is full: short, in one piece, and no reason to stop."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.process import FREE_PORTS, LISTENING, SECONDS, Triglot, clean_environment, triglot_command, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.transports.tls_server import Authority
from tests.waiting import until
from triglot.pb.kserve import inference_pb2 as pb
from triglot.telemetry.log_handlers import MAX_LINES

QUICK = (*FREE_PORTS, "--drain-delay", "0")
FAILS = """
import triglot

class Fails(triglot.Model):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1])]
    execution = "{execution}"

    def infer(self, inputs):
        raise ValueError(inputs["x"][0].decode())
"""
WARNS = """
import logging
import triglot

class Warns(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    execution = "process"

    def infer(self, inputs):
        logging.getLogger("theirs").warning("called with %d", inputs["x"][0])
        return {"y": inputs["x"]}
"""
FORGED = "23:59:59 I all is well"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
LINE = re.compile(r"\d\d:\d\d:\d\d [DIWEC] .*|  .*")


def fail(port: int, text: str) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    with grpc_channel(port) as channel:
        for _ in range(50):
            with pytest.raises(grpc.RpcError) as raised:
                rpc(channel, "ModelInfer", pb.ModelInferResponse)(
                    pb.ModelInferRequest(model_name="m", inputs=[tensor]), timeout=SECONDS
                )
            assert raised.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_a_model_that_fails_again_and_again(tmp_path: Path, execution: str) -> None:
    write_model(tmp_path / "m", FAILS.format(execution=execution))
    with Triglot(tmp_path / "m", *QUICK) as server:
        port, _ = server.ports()
        fail(port, f"one\n{FORGED}\x1b[2J\u2028{FORGED}")
        server.stop()
        text = server.stderr.text()
    assert text.count("Traceback (most recent call last)") <= 2  # Of a process, the two sides' one each.
    assert text.count("m version 1 failed, error") == MAX_LINES + 1  # And the one of the count.
    assert f"E 49 similar errors in the last minute, {50 - MAX_LINES} of them not logged" in text
    lines = text.split("\n")[:-1]
    assert [line for line in lines if not LINE.fullmatch(line) or not line.isprintable()] == []
    assert [line for line in lines if line.startswith(FORGED)] == []


def shoot(port: int, data: bytes) -> None:
    """Fifty connections that send this, and wait until they are closed."""
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
            client.sendall(data)
            try:
                while client.recv(4096):
                    pass
            except ConnectionError:
                pass


def test_connections_that_speak_something_else(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with Triglot(tmp_path / "m", *QUICK, environment={"TRIGLOT_GRPC_TRANSPORT": "h2"}) as server:
        grpc_port, rest_port = server.ports()
        before = len(server.stderr.text().splitlines())
        for data in (
            b"GET / HTTP/9.9\r\n\r\n",
            b"no HTTP \x1b[2J\x00\r\n\r\n",
            b"GET / HTTP/1.1\r\n\xff\x01 \r\n\r\n",
        ):
            shoot(rest_port, data)
        shoot(grpc_port, PREFACE + b"\xff\xff\xff\0\0\0\0\0\0")
        server.stop()
        text = server.stderr.text()
    assert "Traceback" not in text
    assert "similar lines in the last minute not logged: rejected a malformed HTTP request" in text
    assert len(text.splitlines()) - before < 4 * MAX_LINES
    assert all(line.isprintable() for line in text.splitlines())


# The core of older ones writes lines of its own, whatever it is told.
@pytest.mark.parametrize("transport", ["h2", pytest.param("aio", marks=pytest.mark.newest)])
def test_tls_handshakes_that_fail(tmp_path: Path, transport: str) -> None:
    write_model(tmp_path / "m")
    tls = [f"--{name.replace('_', '-')}={value}" for name, value in Authority(tmp_path).server().items()]
    with Triglot(tmp_path / "m", *QUICK, *tls, environment={"TRIGLOT_GRPC_TRANSPORT": transport}) as server:
        ports = server.ports()
        before = len(server.stderr.text().splitlines())
        for port in ports:
            shoot(port, b"\x16\x03\x01\x00\x05hello")
        server.stop()
        lines = server.stderr.text().splitlines()
    assert len(lines) - before < 2 * MAX_LINES
    assert [line for line in lines if not LINE.fullmatch(line)] == []


def test_a_request_that_names_many_versions(tmp_path: Path) -> None:
    write_model(tmp_path / "m" / "1")
    with Triglot(tmp_path, *QUICK, "--model-control-mode", "explicit") as server:
        _, port = server.ports()
        versions = list(range(2, 140_000))
        config = json.dumps({"version_policy": {"specific": {"versions": versions}}})
        status, answer = Rest(port).post("/v2/repository/models/m/load", {"parameters": {"config": config}})
        assert status == 400
        versions[0] = 1
        config = json.dumps({"version_policy": {"specific": {"versions": versions}}})
        Rest(port).post("/v2/repository/models/m/load", {"parameters": {"config": config}})
        server.stop()
        assert len(server.stderr.text()) < 10_000
    assert len(json.dumps(answer)) < 5_000


# --- a log that cannot be written ---


def test_a_full_disk(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with socket.socket() as first, socket.socket() as other:
        first.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], other.getsockname()[1]
    options = ("--grpc-port", str(ports[0]), "--rest-port", str(ports[1]), "--drain-delay", "0")
    with Triglot(tmp_path / "m", *options, "--log-file", "/dev/full") as server:
        server.stdout.wait_for("curl")
        with grpc_channel(ports[0]) as channel:
            assert infer(channel, "m", 5) == 5
        server.stop()
        assert server.stderr.text() == ""


async def test_a_renamed_file_is_opened_anew(tmp_path: Path) -> None:
    """As logrotate does by default, for the server's own lines and those of a model's process."""
    write_model(tmp_path / "m", WARNS)
    file, old = tmp_path / "log", tmp_path / "log.1"
    with Triglot(tmp_path / "m", *QUICK, "--log-file", file, "--access-log") as server:
        server.stdout.wait_for("curl")
        grpc_port = int(LISTENING.search(file.read_text()).group(1))  # type: ignore[union-attr]
        with grpc_channel(grpc_port) as channel:
            assert infer(channel, "m", 1) == 1
            await until(lambda: "ModelInfer" in file.read_text())
            file.rename(old)
            assert infer(channel, "m", 2) == 2
        server.stop()
        assert server.stderr.text() == ""
    before, after = old.read_text(), file.read_text()
    for number, text, other in ((1, before, after), (2, after, before)):
        assert f"called with {number}" in text
        assert f"called with {number}" not in other
        assert text.count("ModelInfer") == 1
    assert "stopped" in after


def test_a_disk_that_was_full(tmp_path: Path) -> None:
    """A limit on the file's size is as good: what reaches it is refused, until the limit is lifted."""
    write_model(tmp_path / "m", FAILS.format(execution="thread"))
    file = tmp_path / "log"
    with Triglot(tmp_path / "m", *QUICK, "--log-file", file) as server:
        server.stdout.wait_for("curl")
        grpc_port = int(LISTENING.search(file.read_text()).group(1))  # type: ignore[union-attr]
        hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (file.stat().st_size + 40, hard))
        fail(grpc_port, "lost")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
        server.stop()
        assert server.stderr.text() == ""
    before, lost, *rest = file.read_text().partition(f"{MAX_LINES} log lines were lost: OSError: ")
    assert lost
    assert before.count("m version 1 failed") <= 1
    assert "stopped" in rest[0]
    # The line that was written in part is a line of its own.
    assert re.search(r"\n\d\d:\d\d:\d\d W $", before)


def test_standard_error_without_a_reader(tmp_path: Path) -> None:
    write_model(tmp_path / "m", FAILS.format(execution="thread"))
    server = subprocess.Popen(
        triglot_command(("serve", tmp_path / "m", *QUICK)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        assert server.stderr is not None
        found = next(match for line in server.stderr if (match := LISTENING.search(line)))
        server.stderr.close()
        fail(int(found.group(1)), "unread")
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS) == 0
    finally:
        server.kill()
        server.wait()
