"""Load requests that are wrong, and configurations that would take the machine or leave the model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.protocols.control_clients import (
    EXPLICIT,
    FINE,
    INVALID,
    Control,
    Explicit,
    Loads,
    Row,
    ask,
    config_text,
    control_of,
    put,
    put_config,
    saying,
)
from tests.protocols.kserve_served import Served, serve_models

DEFAULT = max(8, 2 * len(os.sched_getaffinity(0)))
PROCESS = {"execution": {"string_value": "process"}}
IN_REQUEST = "the configuration in the request to load model 'a'"
POLL = f"failed to load 'a', failed to poll from model repository: {IN_REQUEST}"


@pytest.fixture(params=["grpc", "rest"])
def explicit(request: pytest.FixtureRequest, tmp_path: Path) -> Explicit:
    return Explicit(request.param, tmp_path)


async def test_names_that_cannot_be(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "repository" / "a")
    put(tmp_path / "a")
    async with explicit(tmp_path / "repository") as (_, control):
        for name in ("../a", "..", ".a", "a/b", "a b", "a\n", "ä", "a" * 129):
            for change in (control.load, control.unload):
                code, text = await change(name)
                assert code is INVALID
                assert text.startswith(f"model name {name!r}: expected ")


async def test_parameters_that_cannot_be(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with explicit() as (_, control):
        for parameters, text in (
            ({"confg": "{}"}, "unexpected parameter 'confg', expected 'config'"),
            ({"unload_dependents": True}, "unexpected parameter 'unload_dependents', expected 'config'"),
            ({"config": ""}, f"{POLL}: expected a JSON object"),
            ({"config": "[]"}, f"{POLL}: expected a JSON object"),
            ({"config": '{"name": "b"}'}, f"{POLL}: name: expected 'a', got 'b'"),
        ):
            assert await control.load("a", **parameters) == (INVALID, text)
        assert await control.unload("a", dependents=True) == (
            INVALID,
            "unexpected parameter 'dependents', expected 'unload_dependents'",
        )
        # JSON has no bytes, and null is no value.
        for value in (True, 1, None, b"{}") if explicit.interface == "grpc" else (True, 1):
            code, text = await control.load("a", config=value)
            assert (code, text[:18]) == (INVALID, "parameter 'config'")
            if value is not True:
                code, text = await control.unload("a", unload_dependents=value)
                assert (code, text[:29]) == (INVALID, "parameter 'unload_dependents'")
        assert await control.index() == [Row("a")]


async def test_a_body_with_another_key(tmp_path: Path) -> None:
    """As by mistake: a configuration is a parameter."""
    load = Loads()
    put(tmp_path / "a" / "1")
    async with serve_models([tmp_path], load, **EXPLICIT) as served:
        for verb in ("load", "unload"):
            for fields in ({"config": {"max_batch_size": 4}}, {"parameters": {}, "config": "{}"}):
                body = json.dumps(fields).encode()
                status, _, reply = await served.rest.call("POST", f"/v2/repository/models/a/{verb}", body)
                error = {"error": "unexpected key 'config', expected 'parameters'"}
                assert (status, json.loads(reply)) == (400, error)
        assert load.begun == []


# --- configurations ---


async def expect_refused(served: Served, control: Control, config: str, *texts: str) -> None:
    """The load is refused with these texts, and the model serves as before."""
    instances = served.server.manager.registry.servable("a").model.instances
    code, text = await control.load("a", config=config)
    assert code == INVALID, config[:100]
    assert [part for part in texts if part not in text] == []
    assert "\n" not in text
    [row] = await control.index()
    assert row[:3] == ("a", "1", "READY")
    assert row.reason.removesuffix(";") in text
    assert await ask(served, "a") == 1
    assert served.server.manager.registry.servable("a").model.instances == instances
    assert await control.load("a") == FINE
    assert await control.index() == [Row("a", "1", "READY")]


WRONG = [
    ('"{}"', "expected a JSON object"),
    ('{"nonsense": 1}', 'no field named "nonsense"'),
    ('{"max_batch_size": 4', f"{IN_REQUEST}: "),
    ('{"input": ' + "[" * 100_000, IN_REQUEST),
    ('{"max_batch_size": -1}', "max_batch_size: expected at least 0, got -1"),
    ('{"max_batch_size": 4000000000}', "max_batch_size"),
    ('{"max_batch_size": {}}', "max_batch_size"),
    ('{"backend": "nonsense"}', "backend: expected one of"),
    ('{"input": {"name": "x"}}', "input"),
    ('{"input": [{"name": "x", "data_type": "TYPE_FLOAT"}]}', "TYPE_FLOAT"),
    ('{"input": [{"data_type": "TYPE_INT32"}]}', "input[0].name: expected a name, got none"),
    (
        config_text(input=[{"name": "z", "data_type": "TYPE_FP32", "dims": [1]}]),
        "input[0].name: the configuration says 'z', the model has 'x'",
    ),
    (config_text(max_batch_size=8, input=[{"name": "x", "dims": [3]}]), "input[0].dims: the configuration"),
    (
        config_text(platform="onnxruntime_onnx"),
        "a: found a configuration, but no version of the model; expected 1/",
    ),
]
"""What no configuration may say; what is wrong with its text alone is tested with the reader of configurations."""


async def test_configurations_that_are_wrong(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with explicit(load_model="a") as (served, control):
        for config, text in WRONG:
            await expect_refused(served, control, config, text)


# --- configurations that ask for too much ---


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


def groups(*groups: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    return {"instance_group": list(groups), **parameters}


CPU = "KIND_CPU"
INSTANCES = f"expected at most {DEFAULT} in total, got"
ENTRIES = "expected at most 10000 entries in all lists and tables"
SEQUENCES = "sequence_batching: expected at most 4096 sequences on each instance"
WARM_UP = f"model_warmup: expected at most {2**28} bytes in one request"
RUNS = "model_warmup: expected at most 1000 runs in total"
STATE_BYTES = f"sequence_batching.state: expected at most {2**28} bytes for one sequence"
TOO_MUCH: list[tuple[dict[str, Any], str, str]] = [
    (groups({"count": 40}, parameters=PROCESS), f"instance_group: {INSTANCES} 40; ", "instances"),
    (groups({"count": DEFAULT + 1, "kind": CPU}), f"instance_group: {INSTANCES} {DEFAULT + 1}; ", "instances"),
    (groups(*[{"kind": CPU}] * (DEFAULT + 1)), f"instance_group: {INSTANCES} {DEFAULT + 1}; ", "instances"),
    (groups({"count": DEFAULT}, {"count": 2}), f"instance_group: {INSTANCES} {DEFAULT + 2}; ", "instances"),
    (
        groups({"count": 30, "kind": "KIND_GPU", "gpus": [0, 1, 2]}),
        f"instance_group: {INSTANCES} 90; ",
        "instances",
    ),
    (
        {"parameters": PROCESS | {"ray_max_instances": {"string_value": "0900"}}},
        f"instance_group: {INSTANCES} 900",
        "instances",
    ),
    *[
        (
            {"parameters": {f"{name}_thread_count": {"string_value": count}}},
            f"parameters[{name}_thread_count]: {INSTANCES} {min(int(count), 2**63)}",
            "instances",
        )
        for name, count in (("intra_op", "100000"), ("inter_op", "100000"), ("intra_op", "9" * 4000))
    ],
    ({"max_batch_size": 65_537}, "max_batch_size: expected at most 65536, got 65537", "batch-size"),
    (
        {"max_batch_size": 10**9, "sequence_batching": {}},
        "max_batch_size: expected at most 65536",
        "batch-size",
    ),
    ({"max_batch_size": 4097, "sequence_batching": {"direct": {}}}, f"{SEQUENCES}, got 4097", "sequences"),
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
    (groups({"gpus": [0] * 10_000}), f"{ENTRIES}, got 10001; instance_group.gpus has 10000", "entries"),
    (warm_up({"count": 10**9}), f"{RUNS}, got {10**9}", "warm-up-runs"),
    (warm_up({"count": 600}, {}, {"count": 400}), f"{RUNS}, got 1001", "warm-up-runs"),
    (warm_up({}, dims=[2**26 + 1]), f"{WARM_UP}, got {2**28 + 4}", "bytes"),
    (warm_up({}, dims=[2**62] * 1000), f"{WARM_UP}, got {2**63}", "bytes"),
    (warm_up({"batch_size": 65}, dims=[2**20]), f"{WARM_UP}, got {65 * 2**22}", "bytes"),
    (warm_up({}, datatype="TYPE_STRING", dims=[2**23]), f"{WARM_UP}, got {2**29}", "bytes"),
    (states_of([2**26]), f"{STATE_BYTES}, got {2**29}", "bytes"),
    (states_of([-1], 2**26), f"{STATE_BYTES}, got {2**29}", "bytes"),
    # No option widens these.
    ({"metric_tags": {f"t{at}": "" for at in range(101)}}, "metric_tags: expected at most 100, got 101", ""),
    (buckets(1001), "histogram_ms: expected at most 1000, got 1001", ""),
    ({"parameters": {"p": {"string_value": "x" * 2**20}}}, "the request has", ""),
]


async def test_a_request_asks_for_so_much(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with explicit(load_model="a") as (served, control):
        for fields, text, option in TOO_MUCH:
            hint = f"raise the server's --max-requested-{option} for more" if option else ""
            await expect_refused(served, control, config_text(**fields), text, hint)
        most = config_text(instance_group=[{"count": DEFAULT, "kind": CPU}], **saying(5))
        assert await control.load("a", config=most) == FINE
        assert await ask(served, "a") == 5
        assert served.server.manager.registry.servable("a").model.instances == DEFAULT


OLDEST = {"oldest": {"max_candidate_sequences": 10**9}}
OWN = f"""
max_batch_size: {10**9}
instance_group {{ count: 40 kind: KIND_CPU }}
sequence_batching {{ oldest {{ max_candidate_sequences: {10**9} }} }}
"""


async def test_the_owners_file_is_not_bounded_and_bounds_requests(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", OWN)
    same = {"max_batch_size": 10**9, "sequence_batching": OLDEST, **groups({"count": 40, "kind": CPU})}
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        assert served.server.manager.registry.servable("a").model.max_batch_size == 10**9
        control = control_of(served, "rest")
        assert await control.load("a", config=config_text(**same, **saying(5))) == FINE
        assert served.server.manager.registry.servable("a").model.instances == 40
        for more, expected in (
            ({"max_batch_size": 10**9 + 1}, f"max_batch_size: expected at most {10**9}, got {10**9 + 1}"),
            (groups({"count": 41, "kind": CPU}), "expected at most 40 in total, got 41"),
        ):
            code, text = await control.load("a", config=config_text(**same | more))
            assert (code, expected in text) == (INVALID, True)


VERSIONS = list(range(1, 20_002))
OPTIONS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("instances", 41, groups({"count": 41, "kind": CPU}), groups({"count": 42, "kind": CPU})),
    ("batch_size", 10**9, {"max_batch_size": 10**9}, {"max_batch_size": 10**9 + 1}),
    (
        "sequences",
        10**9,
        {"sequence_batching": OLDEST},
        {"sequence_batching": {"oldest": {"max_candidate_sequences": 10**9 + 1}}},
    ),
    (
        "entries",
        20_000,
        {"version_policy": {"specific": {"versions": VERSIONS[:-1]}}},
        {"version_policy": {"specific": {"versions": VERSIONS}}},
    ),
    ("warm_up_runs", 2, warm_up({"count": 2}, datatype="TYPE_INT32"), warm_up({"count": 3})),
    ("bytes", 40, warm_up({}, datatype="TYPE_INT32", dims=[10]), warm_up({}, dims=[11])),
]


async def test_each_bound_has_an_option(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    widened: dict[str, Any] = {f"max_requested_{option}": most for option, most, _, _ in OPTIONS}
    async with serve_models([tmp_path], **EXPLICIT, load_model="a", **widened) as served:
        control = control_of(served, "rest")
        for option, most, fields, more in OPTIONS:
            code, text = await control.load("a", config=config_text(**more))
            assert (code, f"expected at most {most}" in text) == (INVALID, True), text
            assert await control.load("a", config=config_text(**fields)) == FINE, option
    async with serve_models([tmp_path], **EXPLICIT, load_model="a", max_requested_instances=1) as served:
        config = config_text(instance_group=[{"count": 2, "kind": CPU}])
        await expect_refused(served, control_of(served, "grpc"), config, "expected at most 1 in total,")


async def test_warnings_of_a_request_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        inputs = [{"name": f"t{at}", "is_shape_tensor": True} for at in range(2000)]
        await expect_refused(served, control_of(served, "grpc"), config_text(input=inputs))
    warnings = [record.message for record in caplog.records if "not supported, ignored" in record.message]
    assert len(warnings) == 50
    assert "1950 more such warnings" in caplog.text


# --- configurations that lead out of the model's folder ---

INSIDE, OWN_ONLY = "expected a path inside ", "expected none, or the one in its "
OUTSIDE = "../../outside.py"
FILE_INPUT = {"data_type": 8, "dims": [1], "input_data_file": OUTSIDE}
FIRST_STATE = {"name": "s", "data_type": 8, "dims": [1], "data_file": OUTSIDE}
STATE = {
    "input_name": "i",
    "output_name": "o",
    "data_type": 8,
    "dims": [1],
    "initial_state": [FIRST_STATE],
}
LEADS_OUT: list[tuple[dict[str, Any], str]] = [
    ({"backend": "os"}, "backend: expected one of "),
    ({"backend": "triglot.cli.serve"}, "backend: expected one of "),
    ({"platform": "subprocess"}, "platform: expected one of "),
    ({"default_model_filename": "../b/model.py"}, "default_model_filename: expected a path inside"),
    ({"backend": "python", "default_model_filename": OUTSIDE}, INSIDE),
    ({"backend": "python", "default_model_filename": "/etc/passwd"}, INSIDE),
    ({"backend": "python", "default_model_filename": "link.py"}, "a symbolic link leads out of "),
    ({"output": [{"name": "y", "label_filename": "../outside.py"}]}, INSIDE),
    ({"model_warmup": [{"name": "w", "inputs": {"x": FILE_INPUT}}]}, INSIDE),
    ({"sequence_batching": {"state": [STATE]}}, INSIDE),
    ({"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/usr"}}}, OWN_ONLY),
    ({"parameters": {"EXECUTION_ENV_PATH": {"string_value": "$$TRITON_MODEL_DIRECTORY/../env"}}}, OWN_ONLY),
    (
        {
            "parameters": {
                "execution": {"string_value": "ray"},
                "ray_runtime_env": {"string_value": '{"pip": ["hostile"]}'},
            }
        },
        "parameters[ray_runtime_env]: expected none, or the one in its config.pbtxt",
    ),
]


async def test_a_configuration_stays_in_the_models_folder(explicit: Explicit, tmp_path: Path) -> None:
    repository, ran, remote = tmp_path / "repository", tmp_path / "ran", tmp_path / "remote.py"
    put(repository / "a" / "1", says=1)
    for file in (repository / "outside.py", remote):
        file.write_text(f"open({str(ran)!r}, 'w').close()\n")
    async with explicit(repository, load_model="a") as (served, control):
        (repository / "a" / "1" / "link.py").symlink_to(remote)
        for fields, text in LEADS_OUT:
            code, message = await control.load("a", config=config_text(**fields))
            assert (code, text in message) == (INVALID, True), message
            assert await ask(served, "a") == 1
    assert not ran.exists()
