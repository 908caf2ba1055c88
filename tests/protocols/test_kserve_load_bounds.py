"""What the configuration in a load request may not do: take the machine, or leave the model's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from control_clients import EXPLICIT, FINE, INVALID, ask, config_text, control_of, put, put_config, saying
from kserve_served import Served, serve_models

INTERFACES = pytest.mark.parametrize("interface", ["grpc", "rest"])
DEFAULT = max(8, 2 * len(os.sched_getaffinity(0)))
OPTION = "--max-requested-instances"
PROCESS = {"execution": {"string_value": "process"}}


async def expect_refused(served: Served, interface: str, config: str, *texts: str) -> None:
    """The load is refused with these texts, and the model serves as before."""
    control = control_of(served, interface)
    instances = served.server.manager.registry.servable("a").model.instances
    code, text = await control.load("a", config=config)
    assert code == INVALID
    for part in texts:
        assert part in text
    assert [(row.name, row.state) for row in await control.index()] == [("a", "READY")]
    assert await ask(served, "a") == 1
    assert served.server.manager.registry.servable("a").model.instances == instances


@INTERFACES
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
    interface: str, tmp_path: Path, fields: dict[str, Any], got: int
) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        expected = f"instance_group: expected at most {DEFAULT} in total, got {got}; "
        await expect_refused(served, interface, config_text(**fields), expected, OPTION)
        most = config_text(instance_group=[{"count": DEFAULT, "kind": "KIND_CPU"}], **saying(5))
        assert await control_of(served, interface).load("a", config=most) == FINE
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


@INTERFACES
@pytest.mark.parametrize("name", ["intra_op_thread_count", "inter_op_thread_count"])
async def test_threads_that_an_instance_computes_with_are_bounded_alike(
    interface: str, tmp_path: Path, name: str
) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        config = config_text(parameters={name: {"string_value": "100000"}})
        await expect_refused(
            served, interface, config, f"parameters[{name}]: expected at most {DEFAULT} in total,", OPTION
        )


def tensors(count: int, dims: Sequence[int] = ()) -> list[dict[str, Any]]:
    return [{"name": f"t{at}", "data_type": "TYPE_FP32", "dims": dims} for at in range(count)]


def warm_up(*requests: dict[str, Any], datatype: str = "TYPE_FP32", dims: Sequence[int] = (1,)) -> dict[str, Any]:
    tensor = {"data_type": datatype, "dims": dims, "zero_data": True}
    return {"model_warmup": [{"name": "w", "inputs": {"x": tensor}, **request} for request in requests]}


def states_of(dims: Sequence[int], *initial: int) -> dict[str, Any]:
    first = {"name": "f", "data_type": "TYPE_FP64", "dims": initial, "zero_data": True}
    own = {"input_name": "i", "output_name": "o", "data_type": "TYPE_FP64", "dims": dims}
    return {"sequence_batching": {"state": [own | ({"initial_state": [first]} if initial else {})]}}


def buckets(count: int) -> dict[str, Any]:
    family = {"family": "nv_inference_first_response_histogram_ms"}
    control = {"metric_identifier": family, "histogram_options": {"buckets": list(range(count))}}
    return {"model_metrics": {"metric_control": [control]}}


ENTRIES = "expected at most 10000 entries in all lists and tables"
SEQUENCES = "sequence_batching: expected at most 4096 sequences on each instance"
WARM_UP = f"model_warmup: expected at most {2**28} bytes in one request"
STATE = f"sequence_batching.state: expected at most {2**28} bytes for one sequence"


@INTERFACES
@pytest.mark.parametrize(
    ("fields", "text", "option"),
    [
        ({"max_batch_size": 65_537}, "max_batch_size: expected at most 65536, got 65537", "batch-size"),
        (
            {"max_batch_size": 10**9, "sequence_batching": {}},
            "max_batch_size: expected at most 65536",
            "batch-size",
        ),
        (
            {"max_batch_size": 4097, "sequence_batching": {"direct": {}}},
            f"{SEQUENCES}, got 4097",
            "sequences",
        ),
        (
            {"sequence_batching": {"oldest": {"max_candidate_sequences": 10**9}}},
            f"{SEQUENCES}, got {10**9}",
            "sequences",
        ),
        ({"input": tensors(10_001)}, f"{ENTRIES}, got 10001; input has 10001", "entries"),
        ({"input": tensors(2, [1] * 6000)}, f"{ENTRIES}, got 12002; input.dims has 12000", "entries"),
        (
            {"version_policy": {"specific": {"versions": list(range(1, 10**5 + 1))}}},
            f"{ENTRIES}, got 100000; version_policy.specific.versions has 100000",
            "entries",
        ),
        (
            {"dynamic_batching": {"preferred_batch_size": list(range(1, 20_001))}},
            f"{ENTRIES}, got 20000; dynamic_batching.preferred_batch_size has 20000",
            "entries",
        ),
        (
            {
                "dynamic_batching": {
                    "priority_levels": 9,
                    "priority_queue_policy": {str(at): {} for at in range(10_001)},
                }
            },
            f"{ENTRIES}, got 10001; dynamic_batching.priority_queue_policy has 10001",
            "entries",
        ),
        (
            {"parameters": {f"p{at}": {"string_value": ""} for at in range(10_001)}},
            f"{ENTRIES}, got 10001; parameters has 10001",
            "entries",
        ),
        (
            {"instance_group": [{"gpus": [0] * 10_000}]},
            f"{ENTRIES}, got 10001; instance_group.gpus has 10000",
            "entries",
        ),
        (
            {"parameters": {"intra_op_thread_count": {"string_value": "9" * 5000}}},
            f"parameters[intra_op_thread_count]: expected at most {DEFAULT} in total, got {2**63}",
            "instances",
        ),
        (
            {"parameters": PROCESS | {"ray_max_instances": {"string_value": "0900"}}},
            f"instance_group: expected at most {DEFAULT} in total, got 900",
            "instances",
        ),
        (
            warm_up({"count": 10**9}),
            f"model_warmup: expected at most 1000 runs in total, got {10**9}",
            "warm-up-runs",
        ),
        (
            warm_up({"count": 600}, {}, {"count": 400}),
            "model_warmup: expected at most 1000 runs in total, got 1001",
            "warm-up-runs",
        ),
        (warm_up({}, dims=[2**26 + 1]), f"{WARM_UP}, got {2**28 + 4}", "bytes"),
        (warm_up({}, dims=[2**62] * 1000), f"{WARM_UP}, got {2**63}", "bytes"),
        (warm_up({"batch_size": 65}, dims=[2**20]), f"{WARM_UP}, got {65 * 2**22}", "bytes"),
        (warm_up({}, datatype="TYPE_STRING", dims=[2**23]), f"{WARM_UP}, got {2**29}", "bytes"),
        (states_of([2**26]), f"{STATE}, got {2**29}", "bytes"),
        (states_of([-1], 2**26), f"{STATE}, got {2**29}", "bytes"),
    ],
)
async def test_a_request_asks_for_so_much(
    interface: str, tmp_path: Path, fields: dict[str, Any], text: str, option: str
) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        hint = f"raise the server's --max-requested-{option} for more"
        await expect_refused(served, interface, config_text(**fields), text, hint)


@INTERFACES
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metric_tags": {f"t{at}": "" for at in range(101)}}, "metric_tags: expected at most 100, got 101"),
        (buckets(1001), "histogram_ms: expected at most 1000, got 1001"),
        ({"parameters": {"p": {"string_value": "x" * 2**20}}}, "the request has"),
    ],
)
async def test_what_no_option_widens(interface: str, tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        await expect_refused(served, interface, config_text(**fields), text)


async def test_long_text_with_uploaded_files(tmp_path: Path) -> None:
    """Such requests may be as large as any."""
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a", allow_model_upload=True) as served:
        config = config_text(parameters={"p": {"string_value": "x" * 2**20}})
        expected = f"expected at most {2**20} characters, got {len(config)}"
        await expect_refused(served, "grpc", config, expected)


LARGE = """
max_batch_size: 1000000000
sequence_batching { oldest { max_candidate_sequences: 1000000000 } }
"""


async def test_the_owners_file_is_not_bounded_and_bounds_requests(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", LARGE)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        assert served.server.manager.registry.servable("a").model.max_batch_size == 10**9
        sequences = {"oldest": {"max_candidate_sequences": 10**9}}
        same = config_text(max_batch_size=10**9, sequence_batching=sequences, **saying(5))
        assert await control_of(served, "grpc").load("a", config=same) == FINE
        more = config_text(max_batch_size=10**9 + 1, sequence_batching=sequences)
        code, text = await control_of(served, "grpc").load("a", config=more)
        assert (code, f"max_batch_size: expected at most {10**9}, got {10**9 + 1}" in text) == (INVALID, True)


@pytest.mark.parametrize(
    ("option", "most", "fields", "more"),
    [
        ("batch_size", 10**9, {"max_batch_size": 10**9}, {"max_batch_size": 10**9 + 1}),
        (
            "sequences",
            10**9,
            {"sequence_batching": {"oldest": {"max_candidate_sequences": 10**9}}},
            {"sequence_batching": {"oldest": {"max_candidate_sequences": 10**9 + 1}}},
        ),
        (
            "entries",
            20_000,
            {"version_policy": {"specific": {"versions": list(range(1, 20_001))}}},
            {"version_policy": {"specific": {"versions": list(range(1, 20_002))}}},
        ),
        ("warm_up_runs", 2, warm_up({"count": 2}, datatype="TYPE_INT32"), warm_up({"count": 3})),
        ("bytes", 40, warm_up({}, datatype="TYPE_INT32", dims=[10]), warm_up({}, dims=[11])),
    ],
)
async def test_each_bound_has_an_option(
    tmp_path: Path, option: str, most: int, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    put(tmp_path / "a" / "1", says=1)
    options: dict[str, Any] = EXPLICIT | {"load_model": "a", f"max_requested_{option}": most}
    async with serve_models([tmp_path], **options) as served:
        code, text = await control_of(served, "rest").load("a", config=config_text(**more))
        assert (code, f"expected at most {most}" in text) == (INVALID, True), text
        assert await control_of(served, "rest").load("a", config=config_text(**fields)) == FINE


async def test_warnings_of_a_request_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        inputs = [{"name": f"t{at}", "is_shape_tensor": True} for at in range(2000)]
        await expect_refused(served, "grpc", config_text(input=inputs))
    warnings = [record.message for record in caplog.records if "not supported, ignored" in record.message]
    assert len(warnings) == 50
    assert "1950 more such warnings" in caplog.text


@INTERFACES
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
    interface: str, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    ran = tmp_path / "ran"
    outside = tmp_path / "repository" / "outside.py"
    put(tmp_path / "repository" / "a" / "1", says=1)
    outside.write_text(f"open({str(ran)!r}, 'w').close()\n")
    outside_folder = tmp_path / "elsewhere.py"
    outside_folder.write_text(outside.read_text())
    async with serve_models([tmp_path / "repository"], **EXPLICIT, load_model="a") as served:
        if "link.py" in str(fields):
            (tmp_path / "repository" / "a" / "1" / "link.py").symlink_to(outside_folder)
        code, message = await control_of(served, interface).load("a", config=config_text(**fields))
        assert (code, text in message) == (INVALID, True), message
        assert await ask(served, "a") == 1
    assert not ran.exists()
