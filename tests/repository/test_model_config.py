"""Triton's model configurations: what files and load requests say, and what of it has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.repository.reading_configs import meaning
from triglot.model.config import (
    ALL,
    LATEST,
    NO_CONFIG,
    InstanceGroup,
    ModelConfig,
    TensorConfig,
    VersionPolicy,
    WarmUpInput,
    WarmUpRequest,
)
from triglot.model.scheduling import DynamicBatching
from triglot.parts import BACKENDS
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.model_config import (
    BACKEND_OF_NAME,
    CONFIG_FILE,
    config_of,
    parse_override,
    read_config,
)

IMAGES = """
# An image classifier, as it comes from the exporter.
name: "images"
platform: "onnxruntime_onnx"
max_batch_size : 8
input [
  {
    name: "data_0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 224, 224 ]
  }
]
output [
  {
    name: "fc6_1"
    data_type: TYPE_FP32
    dims: [ 1000 ]
    label_filename: "labels.txt"
  }
]
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] }, { kind: KIND_CPU } ]
default_model_filename: "classifier.onnx"
version_policy: { specific: { versions: [ 1, 3 ] } }
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
optimization { graph: { level: 1 } input_pinned_memory { enable: true } }
"""
TEXTS = """
backend: "python"
input { name: "text" data_type: TYPE_STRING dims: -1 }
input { name: "length" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } optional: true }
output { name: "token" data_type: TYPE_STRING dims: [ -1 ] }
model_transaction_policy { decoupled: True }
parameters: { key: "temperature" value: { string_value: "0.7" } }
parameters { key: 'EXECUTION_ENV_PATH', value { string_value: '/envs/a.tar.gz' } }
parameters { key: "empty" value {} }
version_policy { all {} }
response_cache { enable: false }
"""
WARMED = """
platform: "pytorch_libtorch"
max_batch_size: 16
input { name: "INPUT__0" data_type: TYPE_INT64 dims: [ 128 ] }
output { name: "OUTPUT__0" data_type: TYPE_BF16 dims: [ -1, 2 ] }
model_warmup {
  name: "first"
  batch_size: 4
  inputs { key: "INPUT__0" value { data_type: TYPE_INT64 dims: 128 zero_data: true } }
}
model_warmup [
  {
    name: "second"
    batch_size: 1
    count: 3
    inputs: { key: "b" value: { data_type: TYPE_FP16 dims: [ 2, 0 ] random_data: true } }
    inputs: { key: "a" value: { data_type: TYPE_STRING input_data_file: "raw/a" } }
  }
]
"""


def folder_of(tmp_path: Path, text: str | bytes, name: str = "m") -> Path:
    folder = tmp_path / name
    (folder / "warmup" / "raw").mkdir(parents=True)
    (folder / "warmup" / "raw" / "a").write_bytes(b"\0\0\0\0")
    (folder / "labels.txt").write_text("cat\ndog\n")
    (folder / CONFIG_FILE).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def read(tmp_path: Path, text: str) -> ModelConfig:
    """What a configuration without anything to warn of says."""
    warnings: list[str] = []
    config = read_config(folder_of(tmp_path, text), warnings)
    assert warnings == []
    return config


def warnings_of(tmp_path: Path, text: str) -> list[str]:
    """The warnings, without the file in front of each."""
    warnings: list[str] = []
    config = read_config(folder_of(tmp_path, text), warnings)
    assert all(warning.startswith(f"{config.source}: ") for warning in warnings)
    return [warning.removeprefix(f"{config.source}: ") for warning in warnings]


def test_the_configuration_of_an_image_classifier(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, IMAGES, "images")
    file = str(folder / CONFIG_FILE)
    warnings = ["something earlier"]
    config = read_config(folder, warnings)
    assert meaning(config) == ModelConfig(
        backend="onnx",
        file_name="classifier.onnx",
        version_policy=VersionPolicy(specific=frozenset((1, 3))),
        max_batch_size=8,
        inputs=(TensorConfig("data_0", "FP32", (3, 224, 224)),),
        outputs=(TensorConfig("fc6_1", "FP32", (1000,), folder / "labels.txt"),),
        instance_groups=(InstanceGroup("GPU", 2, (0, 1)), InstanceGroup("CPU", 1)),
        dynamic_batching=DynamicBatching(preferred_sizes=(4, 8), max_queue_delay=100e-6),
    )
    assert config.source == file
    assert warnings == [
        "something earlier",
        f"{file}: optimization: not supported, ignored",
    ]


def test_the_configuration_of_a_python_model(tmp_path: Path) -> None:
    warnings: list[str] = []
    config = read_config(folder_of(tmp_path, TEXTS), warnings)
    assert meaning(config) == ModelConfig(
        backend="python",
        version_policy=ALL,
        inputs=(
            TensorConfig("text", "BYTES", (-1,)),
            TensorConfig("length", "INT32", (1,), optional=True, reshape=()),
        ),
        outputs=(TensorConfig("token", "BYTES", (-1,)),),
        decoupled=True,
        parameters={"temperature": "0.7", "empty": ""},
        environment=Path("/envs/a.tar.gz"),
    )
    assert warnings == []


def test_requests_to_run_first(tmp_path: Path) -> None:
    config = read(tmp_path, WARMED)
    assert (config.backend, config.version_policy, config.max_batch_size) == ("torch", LATEST, 16)
    assert config.outputs == (TensorConfig("OUTPUT__0", "BF16", (-1, 2)),)
    assert config.warm_up == (
        WarmUpRequest("first", {"INPUT__0": WarmUpInput("INT64", (128,))}, batch_size=4, count=1),
        WarmUpRequest(
            "second",
            {
                "a": WarmUpInput("BYTES", (), file=tmp_path / "m" / "warmup" / "raw" / "a"),
                "b": WarmUpInput("FP16", (2, 0), random=True),
            },
            batch_size=1,
            count=3,
        ),
    )


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert read_config(tmp_path, []) is NO_CONFIG


def test_an_empty_configuration_wants_the_latest_version(tmp_path: Path) -> None:
    assert meaning(read(tmp_path, "")) == ModelConfig(version_policy=LATEST)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("version_policy {}", LATEST),
        ("version_policy { latest {} }", LATEST),
        ("version_policy { latest { num_versions: 0 } }", LATEST),
        ("version_policy: { all: {} }", ALL),
        ("version_policy { specific { versions: 2 versions: 2 } }", VersionPolicy(specific=frozenset((2,)))),
    ],
)
def test_version_policies(tmp_path: Path, text: str, policy: VersionPolicy) -> None:
    assert read(tmp_path, text).version_policy == policy


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("backend: 'onnxruntime' platform: 'onnxruntime_onnx'", "onnx"),
        ("backend: 'pytorch' platform: 'pytorch_libtorch'", "torch"),
        ("backend: 'tensorflow' platform: 'tensorflow_savedmodel'", "tensorflow"),
        ("platform: 'sklearn'", "sklearn"),
    ],
)
def test_backends(tmp_path: Path, text: str, backend: str) -> None:
    assert read(tmp_path, text).backend == backend


def test_every_backend_can_be_configured_by_its_own_name() -> None:
    assert set(BACKEND_OF_NAME.values()) == set(BACKENDS)
    assert all(BACKEND_OF_NAME[backend] == backend for backend in BACKENDS)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("instance_group {}", [InstanceGroup("AUTO", 1)]),
        ("instance_group { name: 'a' count: 0 kind: KIND_MODEL }", [InstanceGroup("MODEL", 1)]),
        (
            "instance_group [ { count: 3 }, { gpus: 1 } ]",
            [InstanceGroup("AUTO", 3), InstanceGroup("AUTO", 1, (1,))],
        ),
    ],
)
def test_instance_groups(tmp_path: Path, text: str, groups: list[InstanceGroup]) -> None:
    assert list(read(tmp_path, text).instance_groups) == groups


def control(family: str, buckets: str = "") -> str:
    options = f"histogram_options {{ buckets: [ {buckets} ] }}" if buckets else ""
    return f"metric_control {{ metric_identifier {{ family: '{family}' }} {options} }}"


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


@pytest.mark.parametrize(
    ("text", "buckets"),
    [
        ("", ()),
        ("model_metrics {}", ()),
        (f"model_metrics {{ {control(FIRST_RESPONSE, '-1, 0.0, 1, 2.5')} }}", (-1.0, 0.0, 1.0, 2.5)),
        (
            f"model_metrics {{ {control(FIRST_RESPONSE, '1')} {control(FIRST_RESPONSE, '2, 4')} }}",
            (2.0, 4.0),
        ),
    ],
)
def test_buckets_of_first_responses(tmp_path: Path, text: str, buckets: tuple[float, ...]) -> None:
    assert read(tmp_path, text).first_response_buckets == buckets


@pytest.mark.parametrize(
    ("text", "decoupled"),
    [
        ("", None),
        ("model_transaction_policy {}", False),
        ("model_transaction_policy { decoupled: true }", True),
    ],
)
def test_decoupled_is_set_or_not(tmp_path: Path, text: str, decoupled: bool | None) -> None:
    assert read(tmp_path, text).decoupled is decoupled


def test_a_file_below_the_version_folder(tmp_path: Path) -> None:
    assert read(tmp_path, "default_model_filename: 'saved/model.savedmodel'").file_name == "saved/model.savedmodel"


# --- warnings ---


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            "cc_model_filenames { key: '7.5' value: 'a.plan' } runtime: 'own'",
            ["cc_model_filenames: not supported, ignored", "runtime: not supported, ignored"],
        ),
        (
            "sequence_batching { iterative_sequence: true state { input_name: 'a' output_name: 'b' dims: 1 "
            "data_type: TYPE_FP32 use_same_buffer_for_input_output: true } }",
            [
                "sequence_batching.state[0].use_same_buffer_for_input_output: not supported, ignored",
            ],
        ),
        (
            "parameters { key: 'excution' value { string_value: 'process' } }",
            ["parameters[excution]: passed to the model's own code; did you mean 'execution'?"],
        ),
        (
            "instance_group [ {}, { profile: [ 'a', 'b' ] passive: true } ]",
            [
                "instance_group[1].profile: not supported, ignored",
                "instance_group[1].passive: not supported, ignored",
            ],
        ),
        (
            f"model_metrics {{ {control('nv_inference_count', '1')} }}",
            [
                f"model_metrics.metric_control[0].metric_identifier.family: expected {FIRST_RESPONSE}, "
                "got 'nv_inference_count', ignored"
            ],
        ),
        (
            "output { name: 'y' data_type: TYPE_BOOL dims: 1 is_shape_tensor: true }",
            ["output[0].is_shape_tensor: not supported, ignored"],
        ),
    ],
)
def test_what_has_no_effect_is_named(tmp_path: Path, text: str, warnings: list[str]) -> None:
    assert warnings_of(tmp_path, text) == warnings


def _set(message: Message, field: Any) -> None:
    """Gives a field a value that is not its default."""
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        value["k"] if inner.message_type is not None else value.update(k="v")
    elif hasattr(value, "append"):
        value.add() if field.message_type is not None else value.append("x")
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(message, field.name, "x" if isinstance(value, str) else 1)


UNDERSTOOD = {
    "ModelConfig": """name platform backend version_policy max_batch_size input output instance_group parameters
        default_model_filename model_transaction_policy model_warmup response_cache dynamic_batching
        sequence_batching ensemble_scheduling metric_tags model_metrics""",
    "ModelInput": "name data_type dims format optional reshape",
    "ModelOutput": "name data_type dims label_filename reshape",
    "ModelInstanceGroup": "name count kind gpus",
}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (path, field.name)
        for path, kind in (
            ("", pb.ModelConfig),
            ("input", pb.ModelInput),
            ("output", pb.ModelOutput),
            ("instance_group", pb.ModelInstanceGroup),
        )
        for field in kind.DESCRIPTOR.fields
        if field.name not in UNDERSTOOD[kind.DESCRIPTOR.name].split()
    ],
)
def test_no_other_field_is_passed_over(tmp_path: Path, path: str, field: str) -> None:
    message = pb.ModelConfig()
    message.backend = "onnxruntime"
    inner: Any = getattr(message, path).add() if path else message
    if path in ("input", "output"):
        inner.name, inner.data_type = "x", pb.TYPE_FP32
        inner.dims.append(1)
    _set(inner, inner.DESCRIPTOR.fields_by_name[field])
    warnings: list[str] = []
    config_of(message, tmp_path, "config", warnings)
    key = f"{path}[0].{field}" if path else field
    assert [warning.split(": ")[:2] for warning in warnings] == [["config", key]]


def test_field_of_lists_is_supported_for_models_of_lists(tmp_path: Path) -> None:
    message = pb.ModelConfig(backend="python")
    message.input.add(name="x", data_type=pb.TYPE_FP32, dims=[-1], allow_ragged_batch=True)
    warnings: list[str] = []
    config_of(message, tmp_path, "config", warnings)
    assert not warnings


# --- what load requests bring ---


def test_the_configuration_of_a_load_request(tmp_path: Path) -> None:
    text = """{
        "backend": "onnxruntime", "maxBatchSize": 4, "version_policy": {"latest": {"num_versions": 2}},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, "-1"]}],
        "instance_group": [{"kind": "KIND_CPU", "count": "2"}],
        "parameters": {"a": {"string_value": "b"}}
    }"""
    warnings: list[str] = []
    config = config_of(parse_override(text, "m"), tmp_path, "the request", warnings)
    assert meaning(config) == ModelConfig(
        backend="onnx",
        version_policy=VersionPolicy(latest=2),
        max_batch_size=4,
        inputs=(TensorConfig("x", "FP32", (3, -1)),),
        instance_groups=(InstanceGroup("CPU", 2),),
        parameters={"a": "b"},
    )
    assert config.source == "the request"
    assert warnings == []


@pytest.mark.parametrize("text", ["{}", ' \r\n\t{ "name" : "m" } '])
def test_a_load_request_may_say_little(tmp_path: Path, text: str) -> None:
    assert meaning(config_of(parse_override(text, "m"), tmp_path, "", [])) == ModelConfig(version_policy=LATEST)
