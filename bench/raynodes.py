"""A Ray cluster of several nodes on this machine: each is a raylet with processes of its own."""

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench import servers
from bench.payloads import Floats, tensor
from bench.raymodel import write
from bench.servers import ROOT, Server
from bench.tally import BenchError

SETTINGS = {
    "PYTHONPATH": str(ROOT),  # Of what runs on the nodes.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Nodes give up what takes seconds on a machine that has something else to do, too.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "300",
}
MEMORY = 80 * 2**20
"""Bytes of a node's object store."""
CPUS = 4
"""That a node says it has."""
TRIES = 3


class Nodes:
    """The nodes; the first one, the head, has no room for instances."""

    def __init__(self) -> None:
        from ray import cluster_utils  # noqa: PLC0415 - reads the settings, and other benches do without it.

        self._cluster: Any = cluster_utils.Cluster()
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self._cluster.address)

    def start_head(self) -> None:
        """The first one."""
        self._started(0)

    def add(self) -> None:
        """One more."""
        self.nodes.append(self._started(CPUS))

    def _started(self, cpus: int) -> Any:
        """Its parts wait for each other for 30 s, which nobody can change."""
        error: Exception | None = None
        for _ in range(TRIES):
            before = set(servers.tree(os.getpid()))
            try:
                return self._cluster.add_node(num_cpus=cpus, object_store_memory=MEMORY, include_dashboard=False)
            except Exception as failed:
                error = failed
                _kill(set(servers.tree(os.getpid())) - before)
        raise BenchError(f"a node does not start: {error}") from error

    def kill(self) -> set[int]:
        """A node's every process at once, as if its machine were switched off; the processes that it had."""
        node = self.nodes.pop()
        pids = set(_processes(node))
        _kill(pids)
        self._cluster.remove_node(node, allow_graceful=False)
        return pids

    def processes(self) -> list[int]:
        """Of all nodes."""
        return [pid for node in (self._cluster.head_node, *self.nodes) for pid in _processes(node)]

    def close(self) -> None:
        """End all that it has started."""
        self._cluster.shutdown()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(node: Any) -> list[int]:
    roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
    return [pid for root in roots for pid in servers.tree(root)]


@contextmanager
def cluster(count: int) -> Iterator[Nodes]:
    """So many nodes, and a head."""
    before = dict(os.environ)
    os.environ.update(SETTINGS)  # What starts a node takes them from here.
    nodes = Nodes()
    try:
        nodes.start_head()
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def serving(
    nodes: Nodes, name: str, parameters: Mapping[str, object], count: int, folder: Path
) -> Iterator[tuple[Server, int, int]]:
    """A server of one model with so many instances, and its ports; the folder has the records of its runs."""
    repository = folder / name
    write(repository / "models", name, parameters, count, repository)
    with servers.serving(repository / "models", None, ("--ray-address", nodes.address)) as started:
        yield started


def on_ray(**more: object) -> dict[str, object]:
    """Parameters of a model whose instances are on different nodes."""
    return {"execution": "ray", "ray_placement": "spread"} | more


def values(what: float, rows: int = 1, elements: int = 16, number: int = 0) -> Floats:
    """What has the model do that."""
    made = tensor(rows, elements)
    made[0, :2] = what, number
    return made
