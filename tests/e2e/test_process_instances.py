"""`execution: process` in a running server: what clients see of it, and what becomes of the processes."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.process import FREE_PORTS, SECONDS, Triglot, write_atomically, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import answer_value, infer, infer_request
from tests.protocol_clients.rest import Rest
from tests.waiting import ever_later, wait_until
from triglot.pb.kserve import inference_pb2 as pb

MODEL = """
import os, signal, time
import numpy as np
import triglot

class Doer(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]
    EXECUTION

    def load(self, folder):
        self.folder = folder
        (folder / f"pid-{os.getpid()}").touch()

    def infer(self, inputs):
        x = inputs["x"][0]
        if x == 100:
            return {"y": np.array([os.getpid()], np.int32)}
        if x == 101:
            os._exit(1)
        if x == 102:
            (self.folder / "waits").touch()
            while not (self.folder / "open").exists():
                time.sleep(0.005)
        if x == 103:
            (self.folder / "waits").touch()
            import ctypes
            ctypes.PyDLL(None).sleep(600)
        return {"y": inputs["x"]}

    def close(self):
        (self.folder / "closed").touch()
"""
BY_CLASS = MODEL.replace("EXECUTION", 'execution = "process"')
LOAD = """
plain = Doer.load
def load(self, folder):
    plain(self, folder)
    {}
Doer.load = load
"""
CONFIG = """
backend: "python"
instance_group { count: 2 }
parameters { key: "execution" value { string_value: "process" } }
"""
PID, EXIT, WAIT, HANG = 100, 101, 102, 103
SERVED = [*FREE_PORTS, "--host", "127.0.0.1", "--drain-delay", "0", "--grace", "20"]


@pytest.fixture(name="folder")
def models_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "doer"
    write_model(folder, BY_CLASS)
    return folder


def alive(pid: int) -> bool:
    """Whether there is such a process; a zombie is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def serving(*arguments: str, folder: Path) -> Triglot:
    return Triglot(*SERVED, *arguments, str(folder.parent))


def test_a_crash_is_unavailable_on_every_protocol_and_the_model_serves_again(folder: Path) -> None:
    with serving(folder=folder) as server:
        grpc_port, rest_port = server.ports()
        rest = Rest(rest_port)
        with grpc_channel(grpc_port) as channel:
            assert infer(channel, "doer", 7) == 7
            pid = infer(channel, "doer", PID)
            assert pids(folder) == [pid]
            with pytest.raises(grpc.RpcError) as caught:
                infer(channel, "doer", EXIT)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the process that ran the request exited with status 1" in caught.value.details()
            assert infer(channel, "doer", 8) == 8
            status, answer = rest.infer("doer", EXIT)
            assert (status, "exited with status 1" in answer["error"]) == (503, True)
            status, answer = rest.post("/v1/models/doer:predict", {"instances": [EXIT]})
            assert (status, "exited with status 1" in answer["error"]) == (503, True)
            assert infer(channel, "doer", 9) == 9
        assert not alive(pid)
        server.stop()
    assert not any(map(alive, pids(folder)))
    assert (folder / "closed").exists()


def test_readiness_follows_the_process(folder: Path) -> None:
    with serving(folder=folder) as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            statuses = watch(health_pb2.HealthCheckRequest(service="doer"), timeout=SECONDS)
            status = health_pb2.HealthCheckResponse
            assert next(statuses).status == status.SERVING
            # Its successor has to wait.
            text = (folder / "model.py").read_text()
            write_atomically(folder / "model.py", "import no_such_module\n" + text)
            os.kill(pids(folder)[0], signal.SIGKILL)
            assert next(statuses).status == status.NOT_SERVING
            assert Rest(rest_port).get("/v2/models/doer/ready")[0] == 503
            assert Rest(rest_port).get("/v2/health/ready")[0] == 503
            with pytest.raises(grpc.RpcError) as caught:
                infer(channel, "doer")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            write_atomically(folder / "model.py", text)
            assert next(statuses).status == status.SERVING
            statuses.cancel()
            assert Rest(rest_port).get("/v2/health/ready")[0] == 200
            assert infer(channel, "doer") == 7
        server.stop()


@pytest.mark.parametrize("value", [None, WAIT, HANG])
def test_the_processes_end_with_a_server_that_is_killed(folder: Path, value: int | None) -> None:
    # One holds the interpreter's lock, and nobody finds that it hangs.
    write_model(folder, BY_CLASS + "\nDoer.hang_seconds = 0\n")
    with serving(folder=folder) as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            call = rpc(channel, "ModelInfer", pb.ModelInferResponse)
            if value is not None:
                running = call.future(infer_request("doer", value), timeout=SECONDS)
                wait_until((folder / "waits").exists)
            server.signal(signal.SIGKILL)
            wait_until(lambda: not any(map(alive, pids(folder))))
            if value is not None:
                assert running.code() is grpc.StatusCode.UNAVAILABLE
        server.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_stops_lets_the_processes_finish(folder: Path, number: signal.Signals) -> None:
    with serving(folder=folder) as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            call = rpc(channel, "ModelInfer", pb.ModelInferResponse)
            running = call.future(infer_request("doer", WAIT), timeout=SECONDS)
            wait_until((folder / "waits").exists)
            pid = pids(folder)[0]
            assert os.getsid(pid) == pid  # A terminal's signals do not reach it.
            server.signal(number)
            os.kill(pid, signal.SIGINT)
            server.stderr.wait_for(r"stopping; waits .* for calls of doer version 1 \(1\); a second signal")
            (folder / "open").touch()
            assert answer_value(running.result()) == WAIT
        assert server.wait() == 0
    assert not alive(pid)
    assert (folder / "closed").exists()


def test_a_call_that_does_not_end_does_not_keep_the_server(folder: Path) -> None:
    with serving("--grace", "0.1", folder=folder) as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            call = rpc(channel, "ModelInfer", pb.ModelInferResponse)
            running = call.future(infer_request("doer", WAIT), timeout=SECONDS)
            wait_until((folder / "waits").exists)
            server.stop()
            assert running.code() is grpc.StatusCode.UNAVAILABLE
    assert not any(map(alive, pids(folder)))


def test_configured_processes(folder: Path) -> None:
    (folder / "1").mkdir()
    (folder / "model.py").unlink()
    write_model(folder / "1", MODEL.replace("EXECUTION", ""))
    (folder / "config.pbtxt").write_text(CONFIG)
    with serving(folder=folder) as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            instance_pids = pids(folder / "1")
            assert len(instance_pids) == 2
            assert infer(channel, "doer", PID) in instance_pids
        assert 'processes{model="doer",version="1"} 2' in _metrics(rest_port)
        server.stop()
    assert not any(map(alive, instance_pids))


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as response:
        text: str = response.read().decode()
        return text


def test_a_load_that_takes_too_long_ends_its_process(folder: Path) -> None:
    write_model(folder, BY_CLASS + LOAD.format("time.sleep(600)"))
    for later in ever_later(2):
        with serving("--load-timeout", f"{later}", "--no-exit-on-load-error", folder=folder) as server:
            server.ports()
            server.stderr.wait_for(f"loading took longer than load_timeout, {later} s")
            wait_until(lambda: not any(map(alive, pids(folder))))
            server.stop()
        if pids(folder):
            assert len(pids(folder)) == 1
            break


def test_a_model_that_cannot_be_loaded_is_explained_with_its_trace(folder: Path) -> None:
    write_model(folder, BY_CLASS + LOAD.format("{}['weights']"))
    with Triglot(*SERVED, str(folder.parent)) as server:
        assert server.wait() == 1
        log = server.stderr.text()
    assert "could not be loaded: " in log
    assert "KeyError: 'weights'" in log
    assert "{}['weights']" in log
