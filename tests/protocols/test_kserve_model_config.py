"""ModelConfig over gRPC and REST: what is configured, completed from the serving model (spec 1.3, 1.4, 3.7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import triglot
from tests.protocol_clients.kserve_async import STATUS_OF, GrpcClient, RestClient
from tests.protocols.configured_models import (
    CPU,
    EXPLICIT,
    SEQUENCES,
    TRITON_MODELS,
    Loading,
    Rows,
    X,
    asked,
    configured,
)
from tests.protocols.control_clients import FINE, SAYS, RestControl, config_text, control_of, put, put_config
from tests.protocols.kserve_served import serve_models
from tests.waiting import until
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.model.scheduling import DynamicBatching
from triglot.pb.kserve import inference_pb2 as pb


async def test_both_interfaces_know_all_models() -> None:
    async with serve_models() as served:
        for name in served.server.dataplane.model_names(EVERYTHING):
            config = await asked(served, name)
            assert config["name"] == name
            assert config["backend"] == "python"
            metadata = served.server.dataplane.metadata(EVERYTHING, name)
            batch = [-1] if config["max_batch_size"] else []
            for key, specs in (("input", metadata.signature.inputs), ("output", metadata.signature.outputs)):
                assert [(tensor["name"], [*batch, *tensor["dims"]]) for tensor in config[key]] == [
                    (spec.name, list(spec.shape or ())) for spec in specs
                ]
            assert config["model_transaction_policy"] == {"decoupled": metadata.decoupled}


async def test_a_model_without_a_configuration(tmp_path: Path) -> None:
    assert await configured(tmp_path, max_batch_size=8, instances=3) == {
        "name": "m",
        "platform": "",
        "backend": "python",
        "runtime": "",
        "version_policy": {"all": {}},
        "max_batch_size": 8,
        "input": [
            {
                "name": "x",
                "data_type": "TYPE_FP32",
                "format": "FORMAT_NONE",
                "dims": [3],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
        ],
        "output": [
            {
                "name": "y",
                "data_type": "TYPE_STRING",
                "dims": [],
                "label_filename": "",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
        ],
        "batch_input": [],
        "batch_output": [],
        "instance_group": [{"name": "m", "count": 3, **CPU}],
        "default_model_filename": "model.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
    }


CONFIG_TEXT = """
backend: "python" max_batch_size: 4 version_policy { latest { num_versions: 2 } }
input { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: 3 }
instance_group [ { count: 2 }, { kind: KIND_CPU name: "own" } ]
optimization { priority: PRIORITY_MAX }
parameters { key: "a" value { string_value: "b" } }
metric_tags { key: "team" value: "blue" }
response_cache { enable: true }
dynamic_batching {
  max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1
  priority_queue_policy { key: 2 value { timeout_action: DELAY default_timeout_microseconds: 5 } }
}
model_warmup {
  name: "first" batch_size: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 zero_data: true } }
}
"""


async def test_what_is_configured_is_repeated_and_completed(tmp_path: Path) -> None:
    config = await configured(tmp_path, CONFIG_TEXT)
    assert config["version_policy"] == {"latest": {"num_versions": 2}}
    assert [(tensor["name"], tensor["format"], tensor["dims"]) for tensor in config["input"]] == [
        ("x", "FORMAT_NCHW", [3])
    ]
    assert [(tensor["name"], tensor["data_type"]) for tensor in config["output"]] == [("y", "TYPE_STRING")]
    assert config["instance_group"] == [{"name": "m_0", "count": 2, **CPU}, {"name": "own", "count": 1, **CPU}]
    assert config["optimization"] == {
        "priority": "PRIORITY_MAX",
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }
    assert (config["parameters"], config["metric_tags"]) == ({"a": {"string_value": "b"}}, {"team": "blue"})
    assert (config["max_batch_size"], config["response_cache"]) == (4, {"enable": True})
    assert config["dynamic_batching"] == {
        "preferred_batch_size": [4],
        "max_queue_delay_microseconds": 100,
        "preserve_ordering": False,
        "priority_levels": 2,
        "default_priority_level": 1,
        "priority_queue_policy": {
            "2": {
                "timeout_action": "DELAY",
                "default_timeout_microseconds": 5,
                "allow_timeout_override": False,
                "max_queue_size": 0,
            }
        },
    }
    [first] = config["model_warmup"]
    assert first["inputs"] == {"x": {"data_type": "TYPE_FP32", "dims": [3], "zero_data": True}}


@pytest.mark.parametrize(
    ("file", "backend", "platform", "name", "expected"),
    [
        ("model.onnx", "onnx", "onnxruntime_onnx", "model.onnx", ("onnxruntime", "onnxruntime_onnx")),
        ("model.pt", "torch", "pytorch_libtorch", "model.pt", ("pytorch", "pytorch_libtorch")),
        (
            "model.savedmodel/saved_model.pb",
            "tensorflow",
            "tensorflow_savedmodel",
            "model.savedmodel",
            ("tensorflow", "tensorflow_savedmodel"),
        ),
        (
            "saved_model.pb",
            "tensorflow",
            "tensorflow_savedmodel",
            "saved_model.pb",
            ("tensorflow", "tensorflow_savedmodel"),
        ),
        ("model.joblib", "sklearn", "sklearn", "model.joblib", ("sklearn", "")),
        ("model.ubj", "xgboost", "xgboost", "model.ubj", ("xgboost", "")),
        ("predictor.toml", "predictor", "predictor", "predictor.toml", ("predictor", "")),
    ],
)
@pytest.mark.parametrize("text", ["", "max_batch_size: 4"])
async def test_what_each_kind_of_model_is_called(
    file: str, backend: str, platform: str, name: str, expected: tuple[str, str], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "m" / "7" / file
    path.parent.mkdir(parents=True)
    path.touch()
    if text:
        put_config(tmp_path / "m", text)
    async with serve_models([tmp_path], Loading(Rows, platform=platform), **EXPLICIT) as served:
        config = await asked(served, "m", "7")
        assert (config["backend"], config["platform"], config["default_model_filename"]) == (*expected, name)
        # A client that changes a part of it and sends it back has the same model.
        assert await control_of(served, "grpc").load("m", config=config_text(**config)) == FINE
        assert (await asked(served, "m")) == config


async def test_a_model_that_takes_anything(tmp_path: Path) -> None:
    config = await configured(tmp_path, inputs=(), outputs=(), any_tensors=True)
    assert (config["input"], config["output"], config["max_batch_size"]) == ([], [], 0)


async def test_a_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1", text=SAYS.replace("def infer", "max_batch_size = 4\n\n    def infer"))
    text = 'instance_group { count: 2 } parameters { key: "execution" value { string_value: "process" } }'
    put_config(tmp_path / "m", text + " dynamic_batching {}")
    async with serve_models([tmp_path]) as served:
        config = await asked(served, "m")
        assert (config["max_batch_size"], config["dynamic_batching"]["preferred_batch_size"]) == (4, [4])
        assert config["instance_group"] == [{"name": "m_0", "count": 2, **CPU}]
        assert config["parameters"] == {"execution": {"string_value": "process"}}
        assert [(tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in config["input"]] == [
            ("x", "TYPE_INT32", [])
        ]


async def test_inputs_that_may_be_left_out(tmp_path: Path) -> None:
    config = await configured(tmp_path, inputs=(X, triglot.TensorSpec("bias", "FP32", [1], optional=True)))
    assert [(tensor["name"], tensor["optional"]) for tensor in config["input"]] == [("x", False), ("bias", True)]


# --- which version, and what is not there ---


async def test_a_configuration_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    """All that a class says itself, too: shapes without a dim, any rank, batching, sequences."""
    any_rank = triglot.TensorSpec("r", "INT8", None)
    attributes: list[dict[str, Any]] = [
        {"inputs": (triglot.TensorSpec("x", "FP64", []), any_rank), "outputs": ()},
        {"max_batch_size": 8, "dynamic_batching": DynamicBatching(max_queue_delay=0.01)},
        {"max_batch_size": 8, "sequence_batching": SEQUENCES},
    ]
    put(tmp_path / "m" / "1")
    for attribute in attributes:
        load = Loading(Rows, **attribute)
        async with serve_models([tmp_path], load, **EXPLICIT) as served:
            config = await asked(served, "m")
            assert await control_of(served, "rest").load("m", config=config_text(**config)) == FINE
            assert load.count == 1  # It says nothing new.
            assert await asked(served, "m") == config
            config["parameters"] = {**config["parameters"], "new": {"string_value": "one"}}
            assert await control_of(served, "rest").load("m", config=config_text(**config)) == FINE
            assert load.count == 2
            assert await asked(served, "m") == config
            assert await control_of(served, "grpc").load("m", config=config_text(**config)) == FINE
            assert load.count == 2
            signature = served.server.dataplane.metadata(EVERYTHING, "m").signature
            assert [spec.shape for spec in signature.inputs if spec.name == "r"] in ([None], [])


@pytest.mark.parametrize(
    ("shape", "dims"), [(None, ["-1"]), ([-1], ["-1"]), ([-1, 2], ["-1", "2"]), ([3, -1, -1], ["3", "-1", "-1"])]
)
async def test_dims_are_never_empty_but_for_a_scalar(
    shape: list[int] | None, dims: list[str], tmp_path: Path
) -> None:
    """pytriton 0.7 reads the configuration, and refuses a tensor without dims."""
    spec = triglot.TensorSpec("x", "FP32", shape)
    config = await configured(tmp_path, inputs=(spec,), outputs=(spec,))
    for tensor in (*config["input"], *config["output"]):
        assert list(map(str, tensor["dims"])) == dims


async def test_versions(tmp_path: Path) -> None:
    for version in (1, 2):
        (tmp_path / "m" / str(version)).mkdir(parents=True)
        (tmp_path / "m" / str(version) / ("model.pt", "model.onnx")[version - 1]).touch()
    async with serve_models([tmp_path], Loading(Rows)) as served:
        assert (await asked(served, "m"))["backend"] == "onnxruntime"
        assert (await asked(served, "m", "2"))["backend"] == "onnxruntime"
        assert (await asked(served, "m", "1"))["backend"] == "pytorch"


async def ask_for(interface: GrpcClient | RestClient, name: str, version: str) -> tuple[Code, str]:
    if isinstance(interface, GrpcClient):
        request = pb.ModelConfigRequest(name=name, version=version)
        code, text, _ = await interface.call("ModelConfig", request.SerializeToString())
        return code, text
    path = f"/v2/models/{name}/versions/{version}/config" if version else f"/v2/models/{name}/config"
    status, _, reply = await interface.call("GET", path)
    return next(code for code, number in STATUS_OF.items() if number == status), json.loads(reply)["error"]


@pytest.mark.parametrize("interface", ["grpc", "rest"])
async def test_missing_names(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        expected = {
            ("nobody", ""): (Code.NOT_FOUND, "Request for unknown model: 'nobody' is not found"),
            ("m", "2"): (Code.NOT_FOUND, "Request for unknown model: 'm' version 2 is not found"),
        }
        for (name, version), answer in expected.items():
            assert await ask_for(served.client(interface), name, version) == answer
        assert await control_of(served, interface).unload("m") == FINE
        assert (await ask_for(served.client(interface), "m", ""))[0] is Code.NOT_FOUND


async def test_a_version_that_is_no_number() -> None:
    async with serve_models() as served:
        assert (await ask_for(served.grpc, "words", "v1"))[0] is Code.NOT_FOUND
        assert (await ask_for(served.grpc, "words", "01"))[0] is Code.INVALID_ARGUMENT
        assert (await served.rest.call("GET", "/v2/models/words/versions/v1/config"))[0] == 404


# --- changes ---


async def test_a_policy_that_changes_loads_nothing(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    put_config(tmp_path / "m", "version_policy { all {} }")
    load = Loading(Rows)
    async with serve_models([tmp_path], load, **EXPLICIT) as served:
        control = control_of(served, "rest")
        assert (await asked(served, "m"))["version_policy"] == {"all": {}}
        put_config(tmp_path / "m", "version_policy { specific { versions: 1 } }")
        assert await control.load("m") == FINE
        assert (await asked(served, "m"))["version_policy"] == {"specific": {"versions": [1]}}
        assert load.count == 1
        put_config(tmp_path / "m", 'metric_tags { key: "team" value: "red" }')
        assert await control.load("m") == FINE
        config = await asked(served, "m")
        assert (config["version_policy"], config["metric_tags"]) == (
            {"latest": {"num_versions": 1}},
            {"team": "red"},
        )
        assert load.count == 2


async def test_failed_configuration_is_not_reported(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path], Loading(Rows), **EXPLICIT) as served:
        before = await asked(served, "m")
        control = RestControl(served.rest)
        code, text = await control.load("m", config=config_text(input=[{"name": "z", "data_type": "TYPE_FP32"}]))
        assert (code, "the model has 'x'" in text) == (Code.INVALID_ARGUMENT, True)
        assert await asked(served, "m") == before


async def test_the_extension_is_named() -> None:
    async with serve_models() as served:
        _, _, body = await served.rest.call("GET", "/v2")
        assert "model_configuration" in json.loads(body)["extensions"]


async def test_a_poll_that_finds_another_configuration(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path], Loading(Rows), model_control_mode="poll", poll_interval=0.05) as served:
        put_config(tmp_path / "m", "optimization { priority: PRIORITY_MIN } max_batch_size: 6")

        def changed() -> bool:
            return served.server.manager.registry.servable("m").model.max_batch_size == 6

        await until(changed)
        config = await asked(served, "m")
        assert (config["max_batch_size"], config["optimization"]["priority"]) == (6, "PRIORITY_MIN")


async def test_models_as_triton_users_write_them() -> None:
    """Whatever they omit; and each of them can be loaded from what is said of it."""
    pytest.importorskip("onnxruntime")
    async with serve_models([TRITON_MODELS], **EXPLICIT) as served:
        control = control_of(served, "rest")
        for name in served.server.dataplane.model_names(EVERYTHING):
            config = await asked(served, name)
            assert config["backend"] or config["platform"] == "ensemble"
            for tensor in (*config["input"], *config["output"]):
                assert tensor["dims"]
                assert tensor["data_type"] != "TYPE_INVALID"
            assert await control.load(name, config=config_text(**config)) == FINE
            assert await asked(served, name) == config
