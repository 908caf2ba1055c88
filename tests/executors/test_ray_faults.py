"""Actors and nodes that are lost: what becomes of the calls there, of those that wait, and of the capacity."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from bench.raynodes import Nodes, cluster

from tests.executors import reporting_models, test_process_chaos
from tests.executors.reporting_models import Reporting, reporting
from tests.executors.test_process_chaos import (
    test_a_call_that_runs_for_too_long,
    test_an_idempotent_call_does_not_end_all_processes,
    test_the_other_processes_go_on,
)
from tests.process import unused_ports
from tests.waiting import until
from triglot import Unavailable
from triglot.core.errors import ServingError
from triglot.executors.ray import cluster as ray_cluster
from triglot.executors.ray.connection import MAX_HANDSHAKES, connect
from triglot.executors.remote import process

pytest.importorskip("ray", reason="the ray environment has it")

SHARED = [
    test_a_call_that_runs_for_too_long,
    test_an_idempotent_call_does_not_end_all_processes,
    test_the_other_processes_go_on,
]
"""Tests of processes that run here once more."""
TWO_INSTANCES = "\nReporting.instances = 2\n"
SILENCE = 3.0
"""In place of `MIN_SILENCE`: enough between processes of one machine."""
ONCE = """
name = inputs["name"].item().decode()
(folder / f"run-{name}-{time.monotonic_ns()}").touch()
time.sleep(0.01)
answer = os.getpid()
"""


pytestmark = pytest.mark.usefixtures("reporting_on_ray")


@pytest.fixture(name="reason")
def _reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls wait for Ray's reason, however busy the machine is."""
    monkeypatch.setattr(ray_cluster, "REASON_SECONDS", 60)


@pytest.mark.usefixtures("reason")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_an_actor_is_lost_in_a_call(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        running = asyncio.ensure_future(served.run("(folder / 'in').touch()\ntime.sleep(600)"))
        await served.entered("in")
        monkeypatch.setattr(process, "MIN_SILENCE", SILENCE)
        os.kill(pid, number)
        with pytest.raises(Unavailable, match=r"^reporting: the actor that ran the request ") as caught:
            await running
        why = "sent no heartbeat for " if number == signal.SIGSTOP else "ended on node"
        assert why in str(caught.value)
        assert await served.pid() != pid
        assert served.readings()["processes"] == 1


async def test_a_waiting_call_runs_in_the_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting_models, "MAX_INFLIGHT", 1)  # So it waits in the queue, not in the lost actor.
    monkeypatch.setattr(process, "MIN_SILENCE", SILENCE)
    await test_process_chaos.test_a_waiting_call_is_run_by_the_replacement(tmp_path)


async def test_actor_is_lost_while_idle(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        pid = await served.pid()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: served.readings()["processes_lost ended"] == 1)
        await until(lambda: served.readings()["processes"] == 1)
        assert await served.pid() != pid


async def test_silent_strangers_connect_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as strangers:

        def connect_after_strangers(address: tuple[str, int], secret: bytes) -> socket.socket:
            for _ in range(MAX_HANDSHAKES + 10):
                strangers.enter_context(socket.create_connection(address))
            return connect(address, secret)

        monkeypatch.setattr(ray_cluster, "connect", connect_after_strangers)
        async with reporting(tmp_path) as served:
            assert await served.pid()


class Callers:
    """Call again and again, each request under a name of its own, and keep what became of it."""

    def __init__(self, served: Reporting, count: int) -> None:
        self.served = served
        self.answers: list[str] = []
        self.errors: list[tuple[float, str]] = []
        self._ends = False
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(count)]

    async def _call(self, number: int) -> None:
        for turn in range(100_000):
            if self._ends:
                return
            name = f"{number}.{turn}"
            try:
                await self.served.ask(ONCE, name=name.encode())
            except ServingError as error:
                self.errors.append((time.monotonic(), str(error)))
            else:
                self.answers.append(name)

    async def end(self) -> None:
        """None of them hangs."""
        self._ends = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)


async def test_a_node_is_killed_under_load(
    tmp_path: Path, ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting_models, "CPUS", 4)  # One for each node.
    async with reporting(tmp_path, more=TWO_INSTANCES) as served:
        node_names = [name.split()[-1] for name in served.readings() if name.startswith("node_instances")]
        assert len(node_names) == 2
        callers = Callers(served, 12)
        await until(lambda: len(callers.answers) > 50)
        killed = time.monotonic()
        ray_nodes.kill(ray_nodes.nodes[0])
        await until(lambda: served.readings()["processes"] == 1)
        known = time.monotonic()
        before = len(callers.answers)
        await until(lambda: len(callers.answers) > before + 50)  # The other one goes on.
        added = time.monotonic()
        assert served.readings()["processes"] == 1
        ray_nodes.add()
        node_restarted = time.monotonic()
        await until(lambda: served.readings()["processes"] == 2)
        back = time.monotonic()
        before = len(callers.answers)
        await until(lambda: len(callers.answers) > before + 50)
        await callers.end()
        # The one that ran there, and the one that waited there, but none of those that waited in the queue.
        assert 1 <= len(callers.errors) <= reporting_models.MAX_INFLIGHT
        for when, text in callers.errors:
            assert text.startswith("reporting: the actor that ran the request ")
            assert when <= known + 1
        runs = [name.rpartition("-")[0] for name in served.files("run-")]
        assert len(runs) == len(set(runs))
        assert {f"run-{name}" for name in callers.answers} <= set(runs)
        print(
            f"known {known - killed:.2f} s after the kill, node up in {node_restarted - added:.2f} s, "
            f"instance back {back - node_restarted:.2f} s after that"
        )
        assert back - node_restarted < 60


async def test_the_head_is_lost_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Until the driver ends, Ray's own threads in it compute without a pause.
    monkeypatch.setitem(ray_cluster._SETTINGS, "RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    port = unused_ports()[0]
    with ExitStack() as clusters:
        first = clusters.enter_context(cluster(0, port, head_cpus=1))
        monkeypatch.setattr(reporting_models, "RAY", [first.address])
        async with reporting(tmp_path, more=TWO_INSTANCES) as served:
            address = first.address
            pids = {one_process.body.pid for one_process in served.model._pool.ready()}
            first.kill_head()
            callers = Callers(served, 4)
            await until(lambda: len(callers.answers) > 200)
            assert callers.errors == []
            await callers.end()
            os.kill(pids.pop(), signal.SIGKILL)
            await until(lambda: served.readings()["processes"] == 1)
            assert {await served.pid() for _ in range(10)} == pids
            assert len(pids) == 1
            await asyncio.to_thread(first.close)
            await until(lambda: not served.servable.alive)
            # Ray's signal handlers ask for the main thread.
            second = clusters.enter_context(cluster(0, port, head_cpus=1))
            assert second.address == address
            began = time.monotonic()
            while not served.servable.alive:  # Until it has found the new one.
                await asyncio.wait_for(served.changes.get(), 180)
            print(f"serves again {time.monotonic() - began:.2f} s after the new head is there")
            assert await served.pid() not in pids


@pytest.mark.usefixtures("reason")
async def test_an_actor_takes_too_much_memory(
    tmp_path: Path, ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends it before the node's memory is full."""
    memory = psutil.virtual_memory()
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{1 - memory.available / memory.total + 0.1:.3f}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "50")
    part = memory.total // 400
    grows = f"taken = []\nfor _ in range(80): taken.append(b'x' * {part}); time.sleep(0.02)\ntime.sleep(60)"
    node = ray_nodes.add(small=1)
    try:
        monkeypatch.setattr(reporting_models, "RESOURCES", {"small": 0.1})
        async with reporting(tmp_path) as served:
            pid = await served.pid()
            with pytest.raises(Unavailable, match=r"^reporting: the actor that ran the request .*memory"):
                await served.run(grows)
            assert await served.pid() != pid
    finally:
        ray_nodes.remove(node)
