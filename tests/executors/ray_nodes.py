"""A Ray cluster of several nodes on this machine: each is a raylet with processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import told_models

from triglot.executors.ray.cluster import Cluster

SLOW_MACHINE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "300",
}
"""Nodes give up what takes seconds on a machine that has something else to do, too."""
SETTINGS = SLOW_MACHINE | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# Before Ray is imported, which reads some of them then.
os.environ |= {name: value for name, value in SETTINGS.items() if name not in os.environ}
MEMORY = 80 * 1024 * 1024
TRIES = 5


class Nodes:
    """The nodes of a cluster; the first one, its head, has no room for actors. To be closed."""

    def __init__(self, count: int, port: int | None = None) -> None:
        from ray import cluster_utils  # noqa: PLC0415 - not every environment has it.

        self._cluster: Any = cluster_utils.Cluster()
        self.nodes: list[Any] = []
        self._started(num_cpus=0, **({} if port is None else {"gcs_server_port": port}))
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self._cluster.address)

    def add(self, **resources: float) -> Any:
        """One more."""
        node = self._started(num_cpus=4, resources=resources)
        self.nodes.append(node)
        return node

    def _started(self, **arguments: Any) -> Any:
        """Of a node, the parts wait for each other for 30 s, which nobody can change."""
        for left in reversed(range(TRIES)):
            try:
                return self._cluster.add_node(object_store_memory=MEMORY, include_dashboard=False, **arguments)
            except Exception:
                if not left:
                    raise
        raise AssertionError

    def kill(self, node: Any) -> None:
        """As if its machine were switched off."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Nobody knows the nodes any more; these notice it some time."""
        self._cluster.head_node.kill_gcs_server()

    def close(self) -> None:
        """End all that it has started."""
        self._cluster.shutdown()


@contextmanager
def models_on(nodes: Nodes) -> Iterator[Nodes]:
    """Told models have their instances there."""
    told_models.RAY.append(nodes.address)
    cluster = Cluster.open(nodes.address, Path())  # Its driver takes seconds to start.
    try:
        yield nodes
    finally:
        cluster.close()
        told_models.RAY.clear()
