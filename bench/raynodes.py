"""Runs a Ray cluster of several nodes on this machine: each is a raylet with processes of its own."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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
    # Else actors starve beside what else a busy machine does.
    "RAY_worker_niceness": "0",
    # With the defaults, nodes abandon a start that takes seconds on a busy machine.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    # And Ray Serve kills its proxy again and again.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
}
START_LIMIT = 240.0
"""Seconds for a node, or a server whose instances Ray has to start first, to be ready on a busy machine."""
MEMORY = 80 * 2**20
"""Bytes of a node's object store."""
CPUS = 4
"""CPUs that a node declares."""
RESOURCES = {"disk": 10.0}
"""Custom resources that a node declares."""
TRIES = 5


class Nodes:
    """The nodes of a cluster; the first one, the head, has `cpus` CPUs for instances. Must be closed.

    `port` is that of the head, None: any.
    """

    def __init__(self, port: int | None = None, cpus: int = 0) -> None:
        from ray import cluster_utils  # noqa: PLC0415 - only the ray environment has it.

        self._cluster: Any = cluster_utils.Cluster()
        self.nodes: list[Any] = []
        try:
            self._started(num_cpus=cpus, **({} if port is None else {"gcs_server_port": port}))
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Address of the head node."""
        return str(self._cluster.address)

    def add(self, **resources: float) -> Any:
        """Start one more node, with further custom `resources`, and return it."""
        node = self._started(num_cpus=CPUS, resources=RESOURCES | resources)
        self.nodes.append(node)
        return node

    def _started(self, **options: Any) -> Any:
        """Start a node; retries, since a raylet ends if its agents take longer than 15 s. Raise `BenchError`."""
        from ray._private import services  # noqa: PLC0415 - as above.

        error: Exception | None = None
        for _ in range(TRIES):
            before = set(servers.tree(os.getpid()))
            get_node = partial(_with_patience, before, services.get_node)
            try:
                # Ray itself gives up after 30 s; neither limit can be set.
                with mock.patch.object(services, "get_node", get_node):
                    node = self._cluster.add_node(
                        wait=False,
                        no_monitor=True,
                        include_log_monitor=False,
                        include_dashboard=False,
                        object_store_memory=MEMORY,
                        **options,
                    )
                self._cluster._wait_for_node(node, START_LIMIT)
            except Exception as failed:
                # What it has left ends with this process: without its head, Ray would end this process at once.
                error = failed
            else:
                return node
        raise BenchError(f"a node does not start: {error}") from error

    def kill(self, node: Any) -> set[int]:
        """Kill all processes of a node at once, as if its machine were switched off; returns their ids."""
        self.nodes.remove(node)
        pids = set(_processes(node))
        _kill(pids)
        self._cluster.remove_node(node, allow_graceful=False)
        return pids

    def remove(self, node: Any) -> None:
        """Shut a node down: the cluster knows at once that it is gone."""
        self.nodes.remove(node)
        self._cluster.remove_node(node)

    def kill_head(self) -> None:
        """Kill the server of the head node that knows all nodes."""
        self._cluster.head_node.kill_gcs_server()

    def processes(self) -> list[int]:
        """Return the ids of the processes of all nodes."""
        return [pid for node in (self._cluster.head_node, *self.nodes) for pid in _processes(node)]

    def close(self) -> None:
        """End the cluster and all its processes."""
        self._cluster.shutdown()


def _with_patience(before: set[int], get_node: Callable[..., Any], *node: Any) -> Any:
    """Return Ray's information on a node; waits for up to `START_LIMIT` seconds until there is any.

    Raise `BenchError` if the node's raylet, a process that was not there `before`, has ended.
    """
    until = time.monotonic() + START_LIMIT
    while True:
        try:
            return get_node(*node)
        except RuntimeError as error:
            if time.monotonic() > until or any(map(_is_zombie_raylet, set(servers.tree(os.getpid())) - before)):
                raise BenchError(f"its raylet has ended, or does not register: {error}") from error
        time.sleep(0.1)  # No event signals that.


def _is_zombie_raylet(pid: int) -> bool:
    try:
        return b"(raylet) Z" in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(node: Any) -> list[int]:
    roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
    return [pid for root in roots for pid in servers.tree(root)]


@contextmanager
def cluster(count: int, port: int | None = None, head_cpus: int = 0) -> Iterator[Nodes]:
    """Run a cluster with `count` nodes and a head node, which has `head_cpus` CPUs and listens at `port`."""
    before = dict(os.environ)
    os.environ.update(SETTINGS)  # Nodes inherit them from this process.
    nodes: Nodes | None = None
    try:
        nodes = Nodes(port, head_cpus)
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        if nodes is not None:
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
    flags = ("--ray-address", nodes.address)
    with servers.serving(repository / "models", None, flags, start_limit=START_LIMIT) as started:
        yield started


def on_ray(**more: object) -> dict[str, object]:
    """Return the parameters of a model whose instances are on different nodes, and `more`."""
    return {"execution": "ray", "ray_placement": "spread"} | more


def values(what: float, rows: int = 1, elements: int = 16, number: int = 0) -> Floats:
    """Return an input that selects the work `what`, with the call's number."""
    made = tensor(rows, elements)
    made[0, :2] = what, number
    return made
