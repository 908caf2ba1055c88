"""A server whose models are on a Ray cluster, through its protocols: what clients and operators see."""

from __future__ import annotations

import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from bench.raynodes import Nodes

from tests.process import FREE_PORTS, Triglot, write_atomically, write_model
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until

pytest.importorskip("ray", reason="the ray environment has it")

MODEL = """
import os, time
import numpy as np
import triglot
from .beside import ADDED

class Adder(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def load(self, folder):
        self.more = int((folder / "weights" / "more.txt").read_text())

    def infer(self, inputs):
        if inputs["x"][0] == 101:
            os._exit(1)
        if inputs["x"][0] == 103:
            time.sleep(0.05)
        if inputs["x"][0] == 102:
            return {"y": np.array([os.getpid()], np.int32)}
        return {"y": inputs["x"] + np.int32(ADDED + self.more)}
"""
CONFIG = """
backend: "python"
instance_group { count: COUNT }
parameters { key: "execution" value { string_value: "ray" } }
parameters { key: "ray_num_cpus" value { string_value: "0.5" } }
parameters { key: "ray_placement" value { string_value: "spread" } }
parameters { key: "ray_resources" value { string_value: "disk=1" } }
"""
EXIT, PID, SLOW = 101, 102, 103


def write_adder(folder: Path, added: int, more: int, count: int = 2, says: str = "") -> None:
    write_model(folder / "1", MODEL.replace("    inputs =", f"{says}    inputs ="))
    (folder / "1" / "beside.py").write_text(f"ADDED = {added}\n")
    (folder / "1" / "weights").mkdir(exist_ok=True)
    (folder / "1" / "weights" / "more.txt").write_text(str(more))
    write_atomically(folder / "config.pbtxt", CONFIG.replace("COUNT", str(count)))


def serving(folder: Path, address: str, *arguments: str) -> Triglot:
    options = ["--host", "127.0.0.1", "--drain-delay", "0", "--grace", "20", "--ray-address", address]
    return Triglot(*FREE_PORTS, *options, *arguments, str(folder))


def metrics_of(port: int) -> str:
    """The page, as Prometheus reads it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics") as response:
        text: bytes = response.read()
        return text.decode()


def test_a_model_on_a_cluster_is_served_as_any_other(tmp_path: Path, ray_nodes: Nodes) -> None:
    write_adder(tmp_path / "adder", 10, 100)
    with serving(tmp_path, ray_nodes.address, "--model-control-mode", "poll", "--poll-interval", "0.2") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            assert infer(channel, "adder", 1) == 111
            metrics = metrics_of(rest_port)
            assert metrics.count("triglot_node_instances{") == 2
            assert 'triglot_processes{model="adder",version="1"} 2' in metrics
            # An actor is lost.
            with pytest.raises(grpc.RpcError) as caught:
                infer(channel, "adder", EXIT)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "adder version 1: the actor that ran the request ended on node " in caught.value.details()
            assert infer(channel, "adder", 1) == 111
            wait_until(lambda: 'triglot_processes{model="adder",version="1"} 2' in metrics_of(rest_port))
            # One instance less, without a gap.
            pids = {infer(channel, "adder", PID) for _ in range(30)}
            write_atomically(tmp_path / "adder" / "config.pbtxt", CONFIG.replace("COUNT", "1"))
            wait_until(lambda: 'triglot_processes_wanted{model="adder",version="1"} 1' in metrics_of(rest_port))
            assert infer(channel, "adder", PID) in pids
            # Other files.
            write_adder(tmp_path / "adder", 20, 200, count=1)
            wait_until(lambda: infer(channel, "adder", 1) == 221)
            # Files that do not load leave what is there.
            write_atomically(tmp_path / "adder" / "1" / "beside.py", "ADDED = 1 / 0\n")
            server.stderr.wait_for(rf"{tmp_path}/adder/1/\S*: .*ZeroDivisionError")
            assert infer(channel, "adder", 1) == 221
        server.stop()


def alive(pid: int) -> bool:
    """Whether there is such a process; a zombie is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_instances_come_with_a_burst_and_end_with_a_server_that_is_killed(
    tmp_path: Path, ray_nodes: Nodes
) -> None:
    """The class has the options, of which the configuration changes one."""
    options = "num_cpus=0.5, resources={'disk': 1}, max_instances=9, max_wait=0.02"
    says = f"    execution, instances, ray = 'ray', 'auto', triglot.RayOptions({options})\n"
    write_adder(tmp_path / "adder", 10, 100, says=says)
    most = 'parameters { key: "ray_max_instances" value { string_value: "3" } }\n'
    (tmp_path / "adder" / "config.pbtxt").write_text(most)
    with serving(tmp_path, ray_nodes.address) as server:
        grpc_port, rest_port = server.ports()
        finished = threading.Event()

        def call() -> int:
            calls = 0
            with grpc_channel(grpc_port) as channel:
                while not finished.is_set():
                    assert infer(channel, "adder", SLOW) == SLOW + 110
                    calls += 1
            return calls

        with ThreadPoolExecutor(16) as threads:
            callers = [threads.submit(call) for _ in range(16)]
            try:
                wait_until(lambda: 'triglot_instances{model="adder",version="1"} 3' in metrics_of(rest_port))
            finally:
                finished.set()
            assert all(caller.result() for caller in callers)  # None has failed.
        with grpc_channel(grpc_port) as channel:
            pid = infer(channel, "adder", PID)
        assert alive(pid)
        server.signal(signal.SIGKILL)
        wait_until(lambda: not alive(pid))


def test_a_local_cluster_begins_and_ends_with_the_server(tmp_path: Path) -> None:
    write_adder(tmp_path / "adder", 10, 100, count=1)
    config = tmp_path / "adder" / "config.pbtxt"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "ray_resources" not in line))
    with serving(tmp_path, "local") as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            assert infer(channel, "adder", 1) == 111
            pid = infer(channel, "adder", PID)
        raylet = psutil.Process(pid).parent()
        assert raylet is not None
        assert "raylet" in raylet.name()
        server.stop()
        wait_until(lambda: not alive(pid) and not alive(raylet.pid))


def test_missing_cluster(tmp_path: Path) -> None:
    write_adder(tmp_path / "adder", 10, 100)
    arguments = ["--host", "127.0.0.1", "--ray-address", "127.0.0.1:1", "--no-exit-on-load-error"]
    with Triglot(*FREE_PORTS, *arguments, str(tmp_path)) as server:
        _, rest_port = server.ports()
        assert Rest(rest_port).get("/v2/health/ready")[0] != 200
        server.stderr.wait_for("cannot connect to the Ray cluster at '127.0.0.1:1'")
        server.stop()
