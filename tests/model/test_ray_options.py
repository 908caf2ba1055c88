"""Options of actors, as a model's class says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triglot import Model, ModelLoadError, RayOptions, backends
from triglot.core.errors import NeedsProcess
from triglot.executors.declarations import check_declarations
from triglot.model.config import ModelConfig

CLASS = """
import triglot

class Echo(triglot.Model):
    any_tensors = True
    execution = "ray"
    {says}

    def infer(self, inputs):
        return inputs
"""


def test_options_of_an_actor() -> None:
    assert RayOptions().of_actor(0.0) == {"num_cpus": 1.0, "num_gpus": 0.0, "scheduling_strategy": "DEFAULT"}
    assert RayOptions().of_actor(1.0)["num_gpus"] == 1.0
    environment = {"pip": ["einops"]}
    assert RayOptions(0.5, 2, {"disk": 0.25}, "spread", environment).of_actor(1.0) == {
        "num_cpus": 0.5,
        "num_gpus": 2,
        "resources": {"disk": 0.25},
        "scheduling_strategy": "SPREAD",
        "runtime_env": environment,
    }


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_cpus", "1", "expected a number, got '1'"),
        ("num_cpus", -1, "expected 0 to 999999, got -1"),
        ("num_gpus", True, "expected a number, got True"),
        ("resources", ["disk"], "expected Mapping, got ['disk']"),
        ("placement", "spraed", "expected one of pack, spread, got 'spraed'"),
        ("runtime_env", "{}", "expected Mapping, got '{}'"),
        ("send_files", "no", "expected True or False, got 'no'"),
        ("max_inflight", 0, "expected at least 1, got 0"),
        ("max_inflight", 65, "expected at most 64, got 65"),
        ("min_instances", 0, "expected at least 1, got 0"),
        ("max_instances", 1.5, "expected an integer, got 1.5"),
        ("max_wait", "50", "expected seconds, got '50'"),
        ("max_wait", 0, "expected 0.001 to 60 seconds, got 0"),
    ],
)
def test_invalid_values(name: str, value: Any, error: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared.
        RayOptions(**{name: value})
    assert str(caught.value) == f"ray.{name}: {error}"


def test_invalid_combinations() -> None:
    with pytest.raises(ValueError, match=r"^ray\.resources\['disk'\]: expected a number, got None$"):
        RayOptions(resources={"disk": None})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"^ray\.max_instances: expected at least the min_instances 3, got 2$"):
        RayOptions(min_instances=3, max_instances=2)


def load(folder: Path, says: str) -> Model:
    file = folder / "model.py"
    file.write_text(CLASS.format(says=says))
    return backends.load("python", file, ModelConfig())


def test_a_class_has_its_options_known_before_it_is_loaded(tmp_path: Path) -> None:
    says = "instances = 'auto'; ray = triglot.RayOptions(num_cpus=2, max_instances=4)"
    with pytest.raises(NeedsProcess) as caught:
        load(tmp_path, says)
    assert (caught.value.execution, caught.value.ray) == ("ray", RayOptions(num_cpus=2, max_instances=4))


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("ray = {'num_cpus': 2}", "ray: expected RayOptions, got {'num_cpus': 2}"),
        ("instances = 'auto'", "instances: expected an integer without ray.max_instances, got 'auto'"),
        ("ray = triglot.RayOptions(max_instances=4)", "instances: expected 'auto' with ray.max_instances, got 1"),
    ],
)
def test_invalid_classes(tmp_path: Path, says: str, error: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, says)
    assert str(caught.value).endswith(f"model.py: ValueError: {error}")


def test_a_class_for_processes_may_use_the_name_for_something_else(tmp_path: Path) -> None:
    with pytest.raises(NeedsProcess) as caught:
        load(tmp_path, "execution = 'process'; ray = (0.0, 1.0)")
    assert (caught.value.execution, caught.value.ray) == ("process", None)


def test_auto_is_for_actors_only() -> None:
    class Threads(Model):
        any_tensors = True
        instances = "auto"

        def infer(self, inputs: Any) -> Any:
            return inputs

    with pytest.raises(ValueError, match=r"^instances: expected an integer without execution 'ray', got 'auto'$"):
        check_declarations(Threads())
