"""A server under systemd: what it sends to the service manager's socket, and the unit file in deploy/.

The socket is real; the test is at its end in systemd's place.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import environments
from tests.process import FREE_PORTS, SECONDS, Triglot, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import answer_value, infer, infer_request
from triglot.pb.kserve import inference_pb2 as pb

UNIT = environments.ROOT / "deploy" / "systemd" / "triglot.service"
INTERVAL = 0.2
"""Seconds between two heartbeats, of the two that systemd expects in `WATCHDOG_USEC`."""
CREDENTIALS = struct.Struct("3i")


class Notices:
    """The notices that systemd would receive, at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(2 * INTERVAL * 1e6))}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(SECONDS)

    def next(self) -> tuple[int, str]:
        """The next notice, after the id of the process that has sent it."""
        text, ancillary, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
        ((_, _, credentials),) = ancillary
        return CREDENTIALS.unpack(credentials)[0], text.decode()

    def wait_for(self, state: str) -> str:
        """The next notice that begins with this state, after heartbeats."""
        while (notice := self.next()[1]) == "WATCHDOG=1" != state:
            pass
        assert notice.startswith(state)
        return notice

    def silent(self, seconds: float) -> bool:
        """Whether no more notices come."""
        self.socket.settimeout(0)
        while self._receives():
            pass
        self.socket.settimeout(seconds)
        silent = not self._receives()
        self.socket.settimeout(SECONDS)
        return silent

    def _receives(self) -> bool:
        try:
            self.socket.recv(4096)
        except (BlockingIOError, TimeoutError):
            return False
        return True


@contextmanager
def listening(address: str) -> Iterator[Notices]:
    notices = Notices(address)
    with notices.socket:
        yield notices


@pytest.fixture
def notices(tmp_path: Path) -> Iterator[Notices]:
    with listening(str(tmp_path / "notify")) as notices:
        yield notices


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_server_is_ready_lives_and_stops(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "one")
    address = str(tmp_path / "notify") if kind == "path" else f"@triglot-{os.getpid()}"
    with (
        listening(address) as notices,
        Triglot(tmp_path / "one", *FREE_PORTS, environment=notices.environment) as server,
    ):
        assert notices.next() == (server.pid, "READY=1")
        with grpc_channel(server.ports()[0]) as channel:
            assert infer(channel, "one", 5) == 5
        for _ in range(3):
            assert notices.next() == (server.pid, "WATCHDOG=1")
        server.signal(signal.SIGINT)
        assert notices.wait_for("STOPPING=1")
        assert server.wait() == 0


def test_the_watchdog_hears_nothing_while_the_event_loop_hangs(tmp_path: Path, notices: Notices) -> None:
    os.mkfifo(tmp_path / "hangs")
    model = f"""
import os
import triglot

class Hangs(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    async def infer(self, inputs):
        with open({str(tmp_path / "hangs")!r}) as fifo:
            fifo.read()
        return {{"y": inputs["x"] * ("NOTIFY_SOCKET" not in os.environ)}}
"""
    write_model(tmp_path / "one", model)
    with Triglot(tmp_path / "one", *FREE_PORTS, environment=notices.environment) as server:
        notices.wait_for("READY=1")
        with grpc_channel(server.ports()[0]) as channel:
            call = rpc(channel, "ModelInfer", pb.ModelInferResponse).future(infer_request("one", 5))
            with (tmp_path / "hangs").open("w"):
                assert notices.silent(10 * INTERVAL)
            assert answer_value(call.result(SECONDS)) == 5
        assert notices.wait_for("WATCHDOG=1")
        server.stop()


def test_the_supervisor_notifies_for_its_workers(tmp_path: Path, notices: Notices) -> None:
    write_model(tmp_path / "one")
    options = ("--workers", "2", "--drain-delay", "0")
    with Triglot(tmp_path / "one", *FREE_PORTS, *options, environment=notices.environment) as server:
        assert notices.next() == (server.pid, "READY=1")
        assert notices.next() == (server.pid, "WATCHDOG=1")
        server.signal(signal.SIGHUP)
        _, since = notices.wait_for("RELOADING=1").split("\nMONOTONIC_USEC=")
        assert int(since)
        assert notices.wait_for("READY=1")
        server.signal(signal.SIGTERM)
        assert notices.wait_for("STOPPING=1")
        assert server.wait() == 0


def test_a_server_that_stops_while_it_loads(tmp_path: Path, notices: Notices) -> None:
    os.mkfifo(tmp_path / "loads")
    write_model(tmp_path / "one", f"open({str(tmp_path / 'loads')!r}).read()")
    with Triglot(tmp_path / "one", *FREE_PORTS, environment=notices.environment) as server:
        with (tmp_path / "loads").open("w"):
            server.signal(signal.SIGTERM)
            assert notices.next() == (server.pid, "STOPPING=1")
        server.wait()


def test_socket_without_a_listener(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    missing = tmp_path / "missing"
    with Triglot(tmp_path / "one", *FREE_PORTS, environment={"NOTIFY_SOCKET": str(missing)}) as server:
        server.stderr.wait_for(f"cannot notify systemd of READY=1 at {missing}: .*No such file")
        server.stop()


# --- the unit file ---


def unit_text(tmp_path: Path) -> str:
    """The unit with an executable and a folder of models that exist."""
    program = shutil.which("triglot", path=str(Path(environments.python("dev")).parent))
    text = UNIT.read_text()
    for before, after in (("/opt/triglot/bin/triglot", program), ("/var/lib/triglot/models", tmp_path / "models")):
        assert before in text
        text = text.replace(before, str(after))
    return text


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze, of Debian's systemd")
    unit = tmp_path / UNIT.name
    unit.write_text(unit_text(tmp_path))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_unit_starts(tmp_path: Path, notices: Notices) -> None:
    settings = dict(
        line.split("=", 1) for line in unit_text(tmp_path).splitlines() if "=" in line and line[0] != "#"
    )
    assert (settings["Type"], settings["NotifyAccess"], settings["KillMode"]) == ("notify", "main", "mixed")
    write_model(tmp_path / "models" / "one")
    _, command, *paths = settings["ExecStart"].split()
    with Triglot(*paths, *FREE_PORTS, command=command, environment=notices.environment) as server:
        assert notices.next() == (server.pid, "READY=1")
        server.stop()
