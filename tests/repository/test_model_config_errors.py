"""What is said of model configurations that cannot be meant: file, key, what was expected and what came."""

from __future__ import annotations

from pathlib import Path

import pytest

from triglot.core.errors import Code, InvalidArgument, ModelLoadError
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.model_config import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    config_of,
    parse_override,
    read_config,
)

BACKENDS = (
    "one of catboost, ensemble, libtorch, lightgbm, mlflow, mlserver, onnx, onnxruntime, onnxruntime_onnx, "
    "predictor, python, pytorch, pytorch_libtorch, sklearn, tensorflow, tensorflow_savedmodel, torch, torch_aoti, "
    "xgboost"
)
DATATYPES = (
    "one of TYPE_BOOL, TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, TYPE_INT32, "
    "TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_STRING, TYPE_BF16"
)
DIMS = "expected 1 or more, or -1 for any size, got"


def wrong(tmp_path: Path, text: str) -> str:
    """What is said of the configuration of model `m`, without the file in front; nothing is warned of."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(text)
    warnings: list[str] = []
    with pytest.raises(ModelLoadError) as caught:
        read_config(folder, warnings)
    assert warnings == []
    assert caught.value.code is Code.INVALID_ARGUMENT
    problem, file, rest = str(caught.value).partition(str(folder / CONFIG_FILE))
    assert file
    assert problem in ("", "Invalid protobuf file: '")
    return rest.removeprefix("'").removeprefix(": ")


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("name: m", "1:7 : ", "string"),
        ('name: "m"\nmax_batchsize: 8', "2:1 : ", 'has no field named "max_batchsize"'),
        ("input {\n  name: 'x'\n", "2:9 : ", 'Expected "}"'),
        ("input { data_type: TYPE_FLOAT }", "1:20 : ", "no value named TYPE_FLOAT"),
        ("max_batch_size: 8.5", "1:17 : ", "integer: 8.5"),
        ("max_batch_size: 3000000000", "1:17 : ", "3000000000"),
        ("version_policy { all {} latest {} }", "1:25 : ", '"latest"'),
        ("name: 'm' name: 'm'", "1:17 : ", '"name"'),
        ('{"name": "m"}', "1:1 : ", "{"),
    ],
)
def test_a_text_that_is_no_configuration(tmp_path: Path, text: str, place: str, what: str) -> None:
    problem = wrong(tmp_path, text)
    assert problem.startswith(place)
    assert what in problem


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"# caf\xe9")
    with pytest.raises(ModelLoadError, match="0xe9 in position 5"):
        read_config(tmp_path, [])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / CONFIG_FILE
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError) as caught:
        read_config(tmp_path, [])
    assert str(caught.value) == f"{file}: No such file or directory"
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelLoadError) as caught:
        read_config(tmp_path, [])
    assert str(caught.value) == f"{file}: Is a directory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 'other'", "name: expected the folder's name, 'm', got 'other'"),
        ("max_batch_size: -1", "max_batch_size: expected at least 0, got -1"),
        *(
            (f"model_metrics {{ metric_control: [ {control} ] }}", f"model_metrics.metric_control[0].{problem}")
            for control, problem in (
                ("{}", "metric_identifier.family: expected a name, got none"),
                ("{ metric_identifier {} }", "metric_identifier.family: expected a name, got none"),
                (
                    "{ metric_identifier { family: 'x' } }",
                    "histogram_options.buckets: expected at least one, got none",
                ),
                (
                    "{ metric_identifier { family: 'x' } histogram_options {} }",
                    "histogram_options.buckets: expected at least one, got none",
                ),
                (
                    "{ metric_identifier { family: 'x' } histogram_options { buckets: [ 1, 3, 2 ] } }",
                    "histogram_options.buckets: expected ascending numbers, got [1.0, 3.0, 2.0]",
                ),
                (
                    "{ metric_identifier { family: 'x' } histogram_options { buckets: [ 1, 1 ] } }",
                    "histogram_options.buckets: expected ascending numbers, got [1.0, 1.0]",
                ),
                (
                    "{ metric_identifier { family: 'x' } histogram_options { buckets: [ 1, inf ] } }",
                    "histogram_options.buckets: expected ascending numbers, got [1.0, inf]",
                ),
            )
        ),
        ("platform: 'tensorflow_graphdef'", f"platform: expected {BACKENDS}, got 'tensorflow_graphdef'"),
        ("backend: 'fil'", f"backend: expected {BACKENDS}, got 'fil'"),
        (
            "backend: 'onnxruntime' platform: 'tensorrt_plan'",
            f"platform: expected {BACKENDS}, got 'tensorrt_plan'",
        ),
        (
            "backend: 'onnxruntime' platform: 'pytorch_libtorch'",
            "platform: expected one of backend 'onnxruntime', got 'pytorch_libtorch'",
        ),
        (
            "version_policy { specific { versions: [ 1, -2 ] } }",
            "version_policy.specific.versions[1]: expected at least 0, got -2",
        ),
        (
            "version_policy { specific {} }",
            "version_policy.specific.versions: expected at least one version, got none",
        ),
        ("instance_group { count: 1001 }", "instance_group[0].count: expected at most 1000, got 1001"),
        ("instance_group [ {}, { count: -1 } ]", "instance_group[1].count: expected at least 0, got -1"),
        (
            "instance_group { gpus: [ 0, -1 ] }",
            "instance_group[0].gpus: expected numbers of at least 0, got [0, -1]",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance_group[0].gpus: expected none with KIND_CPU, got [0]",
        ),
        (
            "instance_group { kind: KIND_MODEL gpus: 1 }",
            "instance_group[0].gpus: expected none with KIND_MODEL, got [1]",
        ),
        (
            "instance_group { kind: 7 }",
            "instance_group[0].kind: expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, got 7",
        ),
        (
            "optimization { priority: -3 }",
            "optimization.priority: expected one of PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, got -3",
        ),
    ],
)
def test_a_wrong_value(tmp_path: Path, text: str, message: str) -> None:
    assert wrong(tmp_path, text) == message


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ("[ { data_type: TYPE_FP32 dims: 1 } ]", "[0].name: expected a name, got none"),
        (
            "[ { name: 'x' data_type: TYPE_FP32 dims: 1 }, { name: 'x' data_type: TYPE_BOOL dims: 1 } ]",
            "[1].name: expected different names, got 'x' twice",
        ),
        (
            "{ name: 'x' data_type: 15 dims: 1 }",
            f"[0].data_type: expected {DATATYPES.replace('of ', 'of TYPE_INVALID, ')}, got 15",
        ),
        ("{ name: 'x' data_type: TYPE_FP32 dims: [ 3, -2 ] }", f"[0].dims: {DIMS} [3, -2]"),
        ("{ name: 'x' data_type: TYPE_FP32 dims: [ 0 ] }", f"[0].dims: {DIMS} [0]"),
    ],
)
def test_a_wrong_tensor(tmp_path: Path, kind: str, tensors: str, message: str) -> None:
    assert wrong(tmp_path, f"{kind} {tensors}") == kind + message


def _label(name: str) -> str:
    return f"output {{ name: 'y' data_type: TYPE_FP32 dims: 1 label_filename: '{name}' }}"


def _warm_up(tensor: str) -> str:
    return f"model_warmup {{}} model_warmup {{ batch_size: 1 inputs {{ key: 'x' value {{ {tensor} }} }} }}"


def _data(name: str) -> str:
    return _warm_up(f"data_type: TYPE_FP32 dims: 1 input_data_file: '{name}'")


@pytest.mark.parametrize(
    ("text", "key", "folder"),
    [
        (_label("%s"), "output[0].label_filename", "m"),
        ("default_model_filename: '%s'", "default_model_filename", "m/VERSION"),
        (_data("%s"), "model_warmup[1].inputs[x].input_data_file", "m/warmup"),
    ],
)
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "a\0b"])
def test_a_path_that_leads_out_of_the_folder(tmp_path: Path, text: str, key: str, folder: str, name: str) -> None:
    (tmp_path / "secret").write_text("")
    problem = wrong(tmp_path, text.replace("%s", name.replace("\0", "\\0")))
    assert problem == f"{key}: expected a path inside {tmp_path / folder}, got {name!r}"


@pytest.mark.parametrize("name", ["missing.txt", ".", "n" * 300])
def test_missing_file(tmp_path: Path, name: str) -> None:
    problem = wrong(tmp_path, _label(name))
    assert problem == f"output[0].label_filename: expected a file in {tmp_path / 'm'}, got {name!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_data("missing"), ".input_data_file: expected a file in {}/m/warmup, got 'missing'"),
        (_data(""), ".input_data_file: expected a file in {}/m/warmup, got ''"),
        (_warm_up("dims: 1 zero_data: true"), f".data_type: expected {DATATYPES}, got none"),
        (
            _warm_up("data_type: TYPE_FP32 dims: [ 2, -1 ] zero_data: true"),
            ".dims[1]: expected at least 0, got -1",
        ),
        (
            _warm_up("data_type: TYPE_FP32 dims: 1"),
            ": expected zero_data, random_data or input_data_file, got none",
        ),
    ],
)
def test_a_wrong_input_of_a_request_to_run_first(tmp_path: Path, text: str, message: str) -> None:
    assert wrong(tmp_path, text) == f"model_warmup[1].inputs[x]{message.format(tmp_path)}"


def test_a_request_to_run_first_that_is_too_large(tmp_path: Path) -> None:
    problem = wrong(tmp_path, "max_batch_size: 4 model_warmup { batch_size: 5 }")
    assert problem == "model_warmup[0].batch_size: expected at most the max_batch_size 4, got 5"


PRIORITIES = "priority_levels: 2 default_priority_level: 1"
DELAYED = "{ timeout_action: DELAY default_timeout_microseconds: 10 }"
START = "control { kind: CONTROL_SEQUENCE_START"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preferred_batch_size: [ 4, 9 ]", ".preferred_batch_size[1]: expected 1 to the max_batch_size 8, got 9"),
        ("preferred_batch_size: 0", ".preferred_batch_size[0]: expected 1 to the max_batch_size 8, got 0"),
        ("priority_levels: 2", ".default_priority_level: expected a level from 1 to priority_levels 2, got 0"),
        (
            PRIORITIES + " priority_queue_policy { key: 3 value {} }",
            ".priority_queue_policy[3]: expected a level from 1 to priority_levels 2, got 3",
        ),
        (
            PRIORITIES + " preserve_ordering: true",
            ".priority_levels: expected at most 1 with preserve_ordering, got 2",
        ),
        (
            f"preserve_ordering: true default_queue_policy {DELAYED}",
            ".default_queue_policy.timeout_action: expected REJECT with preserve_ordering, got DELAY",
        ),
        (
            f"preserve_ordering: true priority_queue_policy {{ key: 1 value {DELAYED} }}",
            ".priority_queue_policy[1].timeout_action: expected REJECT with preserve_ordering, got DELAY",
        ),
    ],
)
def test_wrong_dynamic_batching(tmp_path: Path, text: str, message: str) -> None:
    assert wrong(tmp_path, f"max_batch_size: 8 dynamic_batching {{ {text} }}") == f"dynamic_batching{message}"


def test_a_preferred_batch_size_where_the_model_says_the_largest(tmp_path: Path) -> None:
    message = pb.ModelConfig()
    message.dynamic_batching.preferred_batch_size.append(4)
    assert config_of(message, tmp_path, "config", []).max_batch_size == 0
    message.dynamic_batching.preferred_batch_size.append(-4)
    with pytest.raises(ModelLoadError) as caught:
        config_of(message, tmp_path, "config", [])
    assert str(caught.value) == "config: dynamic_batching.preferred_batch_size[1]: expected at least 1, got -4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "oldest { preferred_batch_size: 9 }",
            ".oldest.preferred_batch_size[0]: expected 1 to the max_batch_size 8, got 9",
        ),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            ".direct.minimum_slot_utilization: expected 0 to 1, got 1.5",
        ),
        ("direct { minimum_slot_utilization: nan }", ".direct.minimum_slot_utilization: expected 0 to 1, got nan"),
        ("control_input {}", ".control_input[0].name: expected a unique name, got ''"),
        (
            f"control_input {{ name: 'a' {START} int32_false_true: [ 0, 1 ] }} }} control_input {{ name: 'a' }}",
            ".control_input[1].name: expected a unique name, got 'a'",
        ),
        (
            f"control_input {{ name: 'a' {START} int32_false_true: [ 0, 1 ] }} }} "
            f"control_input {{ name: 'b' {START} int32_false_true: [ 0, 1 ] }} }}",
            ".control_input[1].control[0].kind: expected each kind once, got CONTROL_SEQUENCE_START again",
        ),
        (
            f"control_input {{ name: 'a' {START} }} }}",
            ".control_input[0].control[0]: expected two values in one of int32_false_true, fp32_false_true, "
            "bool_false_true, got none",
        ),
        (
            f"control_input {{ name: 'a' {START} bool_false_true: true }} }}",
            ".control_input[0].control[0]: expected two values in one of int32_false_true, fp32_false_true, "
            "bool_false_true, got {'bool_false_true': [True]}",
        ),
        (
            "control_input { name: 'a' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }",
            ".control_input[0].control[0].data_type: expected one of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, "
            "TYPE_INT32, TYPE_STRING, got TYPE_FP32",
        ),
        (
            "control_input { name: 'a' control { kind: CONTROL_SEQUENCE_CORRID int32_false_true: [ 0, 1 ] } }",
            ".control_input[0].control[0]: expected a data_type for CONTROL_SEQUENCE_CORRID, got int32_false_true",
        ),
    ],
)
def test_wrong_sequence_batching(tmp_path: Path, text: str, message: str) -> None:
    assert wrong(tmp_path, f"max_batch_size: 8 sequence_batching {{ {text} }}") == f"sequence_batching{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence_batching {}", "expected false with sequence_batching, got true"),
        ("model_transaction_policy { decoupled: true }", "expected false for a decoupled model, got true"),
    ],
)
def test_responses_that_cannot_be_cached(tmp_path: Path, text: str, message: str) -> None:
    problem = wrong(tmp_path, f"response_cache {{ enable: true }} {text}")
    assert problem == f"response_cache.enable: {message}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["expected a JSON object"]),
        ("[]", ["expected a JSON object"]),
        ('"{}"', ["expected a JSON object"]),
        ("null", ["expected a JSON object"]),
        ("name: 'm'", ["expected a JSON object"]),
        ("{", ["Failed to load JSON"]),
        ('{"name": "other"}', ["name: expected 'm', got 'other'"]),
        ('{"nam": "m"}', ['Message type "inference.ModelConfig" has no field named "nam"']),
        ('{"input": [{"shape": [1]}]}', ["ModelInput", '"shape"']),
        ('{"input": [{"data_type": "FP32"}]}', ["data_type", "FP32"]),
        ('{"max_batch_size": "many"}', ["max_batch_size", "many"]),
        ('{"max_batch_size": 1.5}', ["max_batch_size", "1.5"]),
        ('{"max_batch_size": true}', ["max_batch_size", "True"]),
        ('{"name": "m", "name": "m"}', ["duplicate key name"]),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', ["scheduling_choice"]),
        ('{"input":' * 5000, ["recursion"]),
        ('{"\\ud800": 1}', [""]),
    ],
)
def test_a_wrong_load_request(text: str, parts: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_override(text, "m")
    problem = caught.value.message
    assert problem.startswith("the configuration in the request to load model 'm': ")
    assert [part for part in parts if part not in problem] == []
    assert len(problem.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("#" * (MAX_CONFIG_BYTES + 1), "expected at most 1048576 bytes"),
        ("instance_group { kind: 99999999999 }", "99999999999"),
    ],
)
def test_files_that_cannot_be_parsed(tmp_path: Path, text: str, error: str) -> None:
    assert error in wrong(tmp_path, text)
