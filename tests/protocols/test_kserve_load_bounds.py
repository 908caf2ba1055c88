"""What the configuration in a load request may not do: take the machine, or leave the model's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from control_doors import EXPLICIT, FINE, INVALID, ask, config_text, control_of, put, put_config, saying
from kserve_served import Served, serve_models

DOORS = pytest.mark.parametrize("door", ["grpc", "rest"])
DEFAULT = max(8, 2 * len(os.sched_getaffinity(0)))
OPTION = "--max-requested-instances"
PROCESS = {"execution": {"string_value": "process"}}


async def expect_refused(served: Served, door: str, config: str, *texts: str) -> None:
    """The load is refused with these texts, and the model serves as before."""
    control = control_of(served, door)
    instances = served.server.manager.registry.servable("a").model.instances
    code, text = await control.load("a", config=config)
    assert code == INVALID
    for part in texts:
        assert part in text
    assert [(row.name, row.state) for row in await control.index()] == [("a", "READY")]
    assert await ask(served, "a") == 1
    assert served.server.manager.registry.servable("a").model.instances == instances


@DOORS
@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"instance_group": [{"count": 40}], "parameters": PROCESS}, 40),
        ({"instance_group": [{"count": DEFAULT + 1, "kind": "KIND_CPU"}]}, DEFAULT + 1),
        ({"instance_group": [{"kind": "KIND_CPU"}] * (DEFAULT + 1)}, DEFAULT + 1),
        ({"instance_group": [{"count": DEFAULT}, {"count": 2}]}, DEFAULT + 2),
        ({"instance_group": [{"count": 30, "kind": "KIND_GPU", "gpus": [0, 1, 2]}]}, 90),
    ],
)
async def test_a_request_starts_so_many_instances(
    door: str, tmp_path: Path, fields: dict[str, Any], got: int
) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        expected = f"instance_group: expected at most {DEFAULT} in total, got {got}; "
        await expect_refused(served, door, config_text(**fields), expected, OPTION)
        most = config_text(instance_group=[{"count": DEFAULT, "kind": "KIND_CPU"}], **saying(5))
        assert await control_of(served, door).load("a", config=most) == FINE
        assert await ask(served, "a") == 5
        assert served.server.manager.registry.servable("a").model.instances == DEFAULT


async def test_as_many_as_the_models_own_configuration_has(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", "instance_group { count: 40 kind: KIND_CPU }")
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        same = config_text(instance_group=[{"count": 40, "kind": "KIND_CPU"}], **saying(5))
        assert await control_of(served, "rest").load("a", config=same) == FINE
        more = config_text(instance_group=[{"count": 41, "kind": "KIND_CPU"}], **saying(6))
        code, text = await control_of(served, "rest").load("a", config=more)
        assert (code, "expected at most 40 in total, got 41" in text) == (INVALID, True)
        assert await ask(served, "a") == 5


async def test_an_option_sets_the_bound(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a", max_requested_instances=41) as served:
        config = config_text(instance_group=[{"count": 41, "kind": "KIND_CPU"}], **saying(5))
        assert await control_of(served, "grpc").load("a", config=config) == FINE
        assert await ask(served, "a") == 5
    async with serve_models([tmp_path], **EXPLICIT, load_model="a", max_requested_instances=1) as served:
        config = config_text(instance_group=[{"count": 2, "kind": "KIND_CPU"}])
        await expect_refused(served, "grpc", config, "expected at most 1 in total,", OPTION)


@DOORS
@pytest.mark.parametrize("name", ["intra_op_thread_count", "inter_op_thread_count"])
async def test_threads_that_an_instance_computes_with_are_bounded_alike(
    door: str, tmp_path: Path, name: str
) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        config = config_text(parameters={name: {"string_value": "100000"}})
        await expect_refused(
            served, door, config, f"parameters[{name}]: expected at most {DEFAULT} in total,", OPTION
        )


@DOORS
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"backend": "os"}, "backend: expected one of "),
        ({"backend": "triglot.cli.serve"}, "backend: expected one of "),
        ({"platform": "subprocess"}, "platform: expected one of "),
        ({"backend": "python", "default_model_filename": "../../outside.py"}, "expected a path inside "),
        ({"backend": "python", "default_model_filename": "/etc/passwd"}, "expected a path inside "),
        ({"backend": "python", "default_model_filename": "link.py"}, "a symbolic link leads out of "),
        ({"output": [{"name": "y", "label_filename": "../outside.py"}]}, "expected a path inside "),
        (
            {
                "model_warmup": [
                    {
                        "name": "w",
                        "inputs": {"x": {"data_type": 8, "dims": [1], "input_data_file": "../../outside.py"}},
                    }
                ]
            },
            "expected a path inside ",
        ),
        (
            {
                "sequence_batching": {
                    "state": [
                        {
                            "input_name": "i",
                            "output_name": "o",
                            "data_type": 8,
                            "dims": [1],
                            "initial_state": [
                                {"name": "s", "data_type": 8, "dims": [1], "data_file": "../../outside.py"}
                            ],
                        }
                    ]
                }
            },
            "expected a path inside ",
        ),
        ({"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/usr"}}}, "expected none, or the one in its "),
        (
            {"parameters": {"EXECUTION_ENV_PATH": {"string_value": "$$TRITON_MODEL_DIRECTORY/../env"}}},
            "expected none, or the one in its ",
        ),
        (
            {
                "parameters": {
                    "execution": {"string_value": "ray"},
                    "ray_runtime_env": {"string_value": '{"pip": ["hostile"]}'},
                }
            },
            "parameters[ray_runtime_env]: expected none, or the one in its config.pbtxt",
        ),
    ],
    ids=str,
)
async def test_a_request_s_configuration_stays_in_the_model_s_folder(
    door: str, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    ran = tmp_path / "ran"
    outside = tmp_path / "repository" / "outside.py"
    put(tmp_path / "repository" / "a" / "1", says=1)
    outside.write_text(f"open({str(ran)!r}, 'w').close()\n")
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(outside.read_text())
    async with serve_models([tmp_path / "repository"], **EXPLICIT, load_model="a") as served:
        if "link.py" in str(fields):
            (tmp_path / "repository" / "a" / "1" / "link.py").symlink_to(elsewhere)
        code, told = await control_of(served, door).load("a", config=config_text(**fields))
        assert (code, text in told) == (INVALID, True), told
        assert await ask(served, "a") == 1
    assert not ran.exists()
