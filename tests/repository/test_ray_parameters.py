"""config.pbtxt: parameters of instances that are actors."""

from __future__ import annotations

import pytest

from triglot.model.config import ModelConfig
from triglot.model.ray_options import RayOptions
from triglot.repository.config.ray_parameters import ray_options
from triglot.repository.config.server_parameters import misspelt, others, server_parameters


def test_without_parameters() -> None:
    assert ray_options({}) == ModelConfig().ray == {}


def test_every_parameter() -> None:
    parameters = {
        "execution": "ray",
        "ray_num_cpus": "0.5",
        "ray_num_gpus": "2",
        "ray_resources": "accelerator_type:A100=1, fast_disk=0.25",
        "ray_placement": "spread",
        "ray_runtime_env": '{"pip": ["einops"], "env_vars": {"A": "b"}}',
        "ray_send_files": "false",
        "ray_max_inflight": "3",
        "ray_max_instances": "8",
        "ray_max_wait_ms": "20",
        "mine": "7",
    }
    options = RayOptions(**ray_options(parameters))
    assert options == RayOptions(
        0.5,
        2.0,
        {"accelerator_type:A100": 1.0, "fast_disk": 0.25},
        "spread",
        {"pip": ["einops"], "env_vars": {"A": "b"}},
        send_files=False,
        max_inflight=3,
        max_instances=8,
        max_wait=0.02,
    )
    assert server_parameters(parameters).execution == "ray"
    assert others(parameters) == {"mine": "7"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ray_num_cpus", "-1", "a number like 1 or 0.5"),
        ("ray_num_gpus", "many", "a number like 1 or 0.5"),
        ("ray_resources", "A100", "names and amounts like accelerator_type:A100=1,fast_disk=0.5"),
        ("ray_resources", "=1", "names and amounts"),
        ("ray_resources", "A100=x", "a number like 1 or 0.5"),
        ("ray_placement", "spraed", "pack or spread, got 'spraed', did you mean 'spread'?"),
        ("ray_runtime_env", "[1]", "a JSON object, as Ray's runtime_env"),
        ("ray_runtime_env", "{", "a JSON object, as Ray's runtime_env"),
        ("ray_send_files", "no", "true or false"),
        ("ray_max_inflight", "0", "a number from 1 to 64"),
        ("ray_max_inflight", "65", "a number from 1 to 64"),
        ("ray_max_instances", "0", "a number from 1 to 1000"),
        ("ray_max_instances", "1001", "a number from 1 to 1000"),
        ("ray_max_wait_ms", "0.5", "a number from 1 to 60000"),
    ],
)
def test_what_is_none(name: str, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^parameters\[{name}\]: expected ") as caught:
        ray_options({"execution": "ray", name: text})
    assert expected in str(caught.value)


def test_they_are_for_actors_only() -> None:
    with pytest.raises(ValueError, match=r"^parameters\[ray_num_cpus\]: expected execution 'ray', got 'process'$"):
        ray_options({"execution": "process", "ray_num_cpus": "1"})


def test_a_name_that_is_nearly_one_of_them() -> None:
    (note,) = misspelt({"ray_num_cpu": "1"})
    assert note.endswith("did you mean 'ray_num_cpus'?")
