"""`execution` "ray" where Ray is not installed, and its tests where it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.environment_tests import check_tests
from tests.executors.reporting_models import write_reporting
from tests.executors.test_process_loading import nothing_more
from tests.process import unused_ports
from triglot import backends
from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.executors.loading import Loading
from triglot.executors.ray.cluster import ActorBody, Cluster
from triglot.executors.remote.place import Program
from triglot.model.config import InstanceGroup, ModelConfig
from triglot.repository.manager.loader import Loader
from triglot.repository.scan.source import ModelFiles

FOLDER = Path(__file__).parent
without_ray = pytest.mark.skipif(find_spec("ray") is not None, reason="this environment has Ray")


@without_ray
def test_the_error_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.touch()
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            Loading(backends.load)("reporting", "python", file, ModelConfig(execution="ray"))
        text = "execution 'ray' needs ray, which is not installed; run: pip install ray"
        assert str(caught.value) == f"{file}: {text}"


@without_ray
async def test_a_class_can_ask_for_it(tmp_path: Path) -> None:
    file = write_reporting(tmp_path, more='Reporting.execution = "ray"\n')
    with pytest.raises(MissingDependency, match="execution 'ray' needs ray, which is not installed"):
        await Loader(backends.load, None, 10).open(ModelFiles("reporting", 1, "python", file), nothing_more)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([InstanceGroup("GPU", 1, [1])], r"instance_group\[0\].gpus: expected none with execution 'ray'"),
        ([InstanceGroup(), InstanceGroup()], "instance_group: expected at most one with ray_max_instances, got 2"),
    ],
)
def test_groups_that_a_cluster_cannot_have(tmp_path: Path, groups: list[InstanceGroup], text: str) -> None:
    config = ModelConfig(execution="ray", instance_groups=groups, ray={"max_instances": 4})
    with pytest.raises(ModelLoadError, match=text):
        Loading(backends.load)("reporting", "python", tmp_path / "model.py", config)


def test_a_cluster_that_cannot_be_reached(tmp_path: Path) -> None:
    """It is tried again and again until the head is back, so no driver is started, which would import Ray."""
    address = f"127.0.0.1:{unused_ports()[0]}"
    cluster = Cluster(address)
    program = Program("reporting", "", "python", tmp_path / "model.py", ModelConfig(), "ray")
    with pytest.raises(OSError, match=f"cannot connect to the Ray cluster at '{address}': \\[Errno "):
        ActorBody(cluster, program, 0, tmp_path, {})


@without_ray
# It has libraries of its own: another environment of these tests changes nothing.
@pytest.mark.long
@pytest.mark.newest
def test_they_hold_with_ray() -> None:
    """In one process, whose cluster they share; the bench is last, because of what Ray Serve leaves there."""
    files = [FOLDER / f"test_ray_{name}.py" for name in ("calls", "faults", "served")]
    check_tests("ray", *files, FOLDER.parent.parent / "bench" / "test_ray.py", seconds=1800)
