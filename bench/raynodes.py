"""Runs a Ray cluster of several nodes on this machine: each is a raylet with processes of its own."""

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
    "PYTHONPATH": str(ROOT),  # For the processes on the nodes.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # With the defaults, nodes abandon a start that takes seconds on a busy machine.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "300",
}
MEMORY = 80 * 2**20
"""Bytes of a node's object store."""
CPUS = 4
"""CPUs that a node declares."""
TRIES = 3


class Nodes:
    """The nodes of a cluster; the first one, the head, has no CPUs for instances."""

    def __init__(self) -> None:
        from ray import cluster_utils  # noqa: PLC0415 - reads the settings; other benches do not need it.

        self._cluster: Any = cluster_utils.Cluster()
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        """Address of the head node."""
        return str(self._cluster.address)

    def start_head(self) -> None:
        """Start the head node."""
        self._started(0)

    def add(self) -> None:
        """Start one more node."""
        self.nodes.append(self._started(CPUS))

    def _started(self, cpus: int) -> Any:
        """Start a node; retries after a failure, since its parts wait for each other for a fixed limit of 30 s."""
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
        """Kill all processes of a node at once, as if its machine were switched off; returns their ids."""
        node = self.nodes.pop()
        pids = set(_processes(node))
        _kill(pids)
        self._cluster.remove_node(node, allow_graceful=False)
        return pids

    def processes(self) -> list[int]:
        """Returns the ids of the processes of all nodes."""
        return [pid for node in (self._cluster.head_node, *self.nodes) for pid in _processes(node)]

    def close(self) -> None:
        """End the cluster and all its processes."""
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
    """Run a cluster with `count` nodes and a head node."""
    before = dict(os.environ)
    os.environ.update(SETTINGS)  # Nodes inherit them from this process.
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
    """Run a server of one model with `count` instances; yields it and its ports. `folder` has records of runs."""
    repository = folder / name
    write(repository / "models", name, parameters, count, repository)
    with servers.serving(repository / "models", None, ("--ray-address", nodes.address)) as started:
        yield started


def on_ray(**more: object) -> dict[str, object]:
    """Returns the parameters of a model whose instances are on different nodes, and `more`."""
    return {"execution": "ray", "ray_placement": "spread"} | more


def values(what: float, rows: int = 1, elements: int = 16, number: int = 0) -> Floats:
    """Returns an input that selects the work `what`, with the call's number."""
    made = tensor(rows, elements)
    made[0, :2] = what, number
    return made
