"""Triton's model configurations: what holds for all of them, on the bounds, and for what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from hypothesis import example, given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.model_config import (
    BACKEND_OF_NAME,
    CONFIG_FILE,
    config_of,
    parse_override,
    read_config,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
DIMS = st.lists(st.sampled_from((-1, 1, 2, 2**40)), min_size=1, max_size=4)
DATATYPES = st.sampled_from(pb.DataType.values()[1:])
TENSORS = st.lists(st.tuples(NAMES, DATATYPES, DIMS), max_size=3, unique_by=lambda tensor: tensor[0])
GROUPS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 9), st.sampled_from((0, 1)), st.lists(st.integers(0, 7), max_size=3)),
        st.tuples(st.integers(0, 9), st.sampled_from((2, 3)), st.just([])),
    ),
    max_size=3,
)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """Configurations of model `m`, of which everything is understood."""
    message: Any = pb.ModelConfig(
        name=draw(st.sampled_from(("", "m"))),
        backend=draw(st.sampled_from(("", *sorted(BACKEND_OF_NAME.keys() - {"ensemble"})))),
        max_batch_size=draw(st.integers(0, 2**31 - 1)),
    )
    for field, tensors in ((message.input, draw(TENSORS)), (message.output, draw(TENSORS))):
        for name, datatype, dims in tensors:
            field.add(name=name, data_type=datatype, dims=dims)
    for count, kind, gpus in draw(GROUPS):
        message.instance_group.add(count=count, kind=kind, gpus=gpus)
    for name, text in draw(st.dictionaries(NAMES, NAMES, max_size=3)).items():
        message.parameters[name].string_value = text
    match draw(st.sampled_from(("latest", "all", "specific", "none"))):
        case "latest":
            message.version_policy.latest.num_versions = draw(st.integers(1, 2**32 - 1))
        case "all":
            message.version_policy.all.SetInParent()
        case "specific":
            versions = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3)
            message.version_policy.specific.versions.extend(draw(versions))
    if draw(st.booleans()):
        message.model_transaction_policy.decoupled = draw(st.booleans())
    for name, datatype, dims in draw(TENSORS):
        warm_up = message.model_warmup.add(name=name, count=draw(st.integers(0, 3)))
        warm_up.inputs[name].data_type = datatype
        warm_up.inputs[name].dims.extend(dim for dim in dims if dim > 0)
        setattr(warm_up.inputs[name], draw(st.sampled_from(("zero_data", "random_data"))), True)
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "m"
    folder.mkdir()
    return folder


@given(message=messages())
def test_a_file_says_what_its_message_says(folder: Path, message: Any) -> None:
    warnings: list[str] = []
    expected = config_of(message, folder, "", warnings)
    (folder / CONFIG_FILE).write_text(text_format.MessageToString(message, as_utf8=True))
    assert read_config(folder, warnings) == expected
    assert warnings == []
    assert [(tensor.name, list(tensor.dims or ())) for tensor in expected.inputs] == [
        (tensor.name, tensor.dims) for tensor in message.input
    ]
    assert [instance_group.count for instance_group in expected.instance_groups] == [
        group.count or 1 for group in message.instance_group
    ]


LIMITS = """
max_batch_size: 4
model_warmup { batch_size: 4 }
dynamic_batching {
  preferred_batch_size: [ 1, 4 ] priority_levels: 1 default_priority_level: 1 preserve_ordering: true
  default_queue_policy { timeout_action: DELAY }
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 1 } }
}
"""
SEQUENCES = """
max_batch_size: 4
sequence_batching {
  direct { minimum_slot_utilization: 1 }
  control_input { name: "a" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input {
    name: "b"
    control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] }
  }
  control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
}
response_cache { enable: false }
"""


@pytest.mark.parametrize(
    "text", [LIMITS, SEQUENCES, "dynamic_batching { priority_queue_policy { key: 7 value {} } }"]
)
def test_values_on_the_bounds_are_fine(folder: Path, text: str) -> None:
    warnings: list[str] = []
    (folder / CONFIG_FILE).write_text(text)
    config = read_config(folder, warnings)
    assert warnings == []
    assert [request.batch_size for request in config.warm_up] == [4] * text.count("model_warmup")


def _with_texts(value: Any) -> Any:
    """JSON with texts in place of numbers."""
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    return str(value) if type(value) is int else value


def _with_numbers(value: Any) -> Any:
    """JSON with numbers in place of texts of dims and versions, which protobuf writes as texts."""
    if isinstance(value, dict):
        # Tensors and parameters may have such names, too; only the fields are lists.
        return {
            key: [int(value) for value in item]
            if key in ("dims", "versions") and isinstance(item, list)
            else _with_numbers(item)
            for key, item in value.items()
        }
    return [_with_numbers(item) for item in value] if isinstance(value, list) else value


@given(message=messages(), snake=st.booleans())
@example(message=pb.ModelConfig(parameters={"dims": pb.ModelParameter(string_value="0")}), snake=False)
def test_numbers_of_a_load_request_may_be_texts(message: Any, snake: bool) -> None:
    printed = _with_numbers(json_format.MessageToDict(message, preserving_proto_field_name=snake))
    assert parse_override(json.dumps(printed), "m") == message
    assert parse_override(json.dumps(_with_texts(printed)), "m") == message


TOKENS = "{ } [ ] < > : , ; # 1 -1 0x10 1e9 inf true 99 TYPE_FP32 KIND_GPU 'x' \"y\" '../x' '/' 'a\\0b' '\\xff' '"
KEYS = "name data_type dims kind count gpus key value inputs zero_data input_data_file label_filename all latest"
WORDS = [
    *(field.name for field in pb.ModelConfig.DESCRIPTOR.fields),
    *KEYS.split(),
    *TOKENS.split(),
    f"'{'n' * 300}'",
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=16).map(" ".join)


@given(content=st.binary(max_size=200) | TEXTS.map(str.encode))
def test_whatever_a_file_holds_is_a_configuration_or_an_error(folder: Path, content: bytes) -> None:
    file = str(folder / CONFIG_FILE)
    (folder / CONFIG_FILE).write_bytes(content)
    try:
        place = read_config(folder, []).source
    except ModelLoadError as error:
        place = str(error)
    assert file in place


JSON_KEYS = st.sampled_from(["@type", "[a.b]", *WORDS]) | st.text(max_size=3)
JSON_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3)
)


def json_values(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(JSON_KEYS, inner, max_size=3)


@given(text=st.text(max_size=100) | st.recursive(JSON_LEAVES, json_values).map(json.dumps))
def test_whatever_a_load_request_holds_is_a_configuration_or_an_error(text: str) -> None:
    try:
        place = parse_override(text, "m").name or "m"
    except InvalidArgument as error:
        place, _, _ = error.message.partition(": ")
    assert place in ("m", "the configuration in the request to load model 'm'")
