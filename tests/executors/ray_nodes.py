"""Pytest plugin: a Ray cluster of several nodes on this machine, which all tests of a run share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from bench.raynodes import Nodes


@pytest.fixture(name="ray_nodes", scope="session")
def all_nodes() -> Iterator[Nodes]:
    """Yield a cluster of two nodes beside its head, and keeps the driver of this process, which starts slowly."""
    from bench.raynodes import cluster  # noqa: PLC0415 - other runs need neither bench nor Ray.

    from triglot.executors.ray.cluster import Cluster  # noqa: PLC0415

    # With Ray's 3000, a cluster places actors on a node for 15 s after it was killed.
    with mock.patch.dict(os.environ, {"RAY_health_check_period_ms": "500"}), cluster(2) as nodes:
        opened = Cluster.open(nodes.address, Path())
        yield nodes
        opened.close()


@pytest.fixture(scope="module")
def reporting_on_ray(ray_nodes: Nodes) -> Iterator[None]:
    """Run the instances of reporting models on the cluster."""
    from tests.executors import reporting_models  # noqa: PLC0415 - as above.

    reporting_models.RAY.append(ray_nodes.address)
    yield
    reporting_models.RAY.clear()
