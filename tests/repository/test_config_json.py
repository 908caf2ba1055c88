"""A configuration as JSON, against what protobuf itself makes of it."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.as_json import json_object, json_text

DEFAULTS = "always_print_fields_with_no_presence"
# Before protobuf 5.26 it was called otherwise.
PRINTS_ALL = DEFAULTS if DEFAULTS in inspect.signature(json_format.MessageToDict).parameters else ""
VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(allow_nan=False, allow_infinity=False, width=32),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
}


def fill(draw: Any, message: Any) -> None:
    """Sets some of the fields, at any depth."""
    fields = sorted(message.DESCRIPTOR.fields, key=lambda field: field.number)
    chosen = st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda field: field.number)
    for field in draw(chosen) if fields else []:
        value, kind = getattr(message, field.name), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            _fill_map(draw, value, kind)
        elif kind is not None:
            items = [value.add() for _ in range(draw(st.integers(1, 2)))] if hasattr(value, "add") else [value]
            for item in items:
                item.SetInParent()
                fill(draw, item)
        elif hasattr(value, "extend"):
            value.extend(draw(st.lists(_values(field), max_size=3)))
        else:
            setattr(message, field.name, draw(_values(field)))


def _fill_map(draw: Any, values: Any, entry: Any) -> None:
    key, inner = draw(_values(entry.fields_by_name["key"])), entry.fields_by_name["value"]
    if inner.message_type is None:
        values[key] = draw(_values(inner))
    else:
        fill(draw, values[key])


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from(sorted(field.enum_type.values_by_number))
    return VALUES[field.cpp_type]


@st.composite
def messages(draw: Any) -> pb.ModelConfig:
    message = pb.ModelConfig()
    fill(draw, message)
    return message


def plain(value: Any) -> Any:
    """Numbers and their texts alike."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return str(int(value)) if value == int(value) else repr(value)


@given(message=messages())
def test_every_field_is_as_protobuf_says(message: pb.ModelConfig) -> None:
    options: dict[str, Any] = {PRINTS_ALL or "including_default_value_fields": True}
    theirs = json_format.MessageToDict(message, preserving_proto_field_name=True, **options)
    assert plain(json_object(message)) == plain(theirs)


@given(message=messages())
def test_protobuf_reads_it_back(message: pb.ModelConfig) -> None:
    text = json_text(message)
    assert json_format.Parse(text, pb.ModelConfig()) == message
    assert json.loads(text) == json_object(message)


def numbers(message: Any, printed: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is said of each field that is a number."""
    for field in message.DESCRIPTOR.fields:
        if field.name not in printed or field.enum_type is not None:
            continue
        value, known = printed[field.name], getattr(message, field.name)
        if field.message_type is None:
            if field.cpp_type not in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_BOOL):
                yield from ((field.name, number) for number in (value if isinstance(value, list) else [value]))
        elif field.message_type.GetOptions().map_entry:
            for key, item in value.items():
                inner = field.message_type.fields_by_name["key"].cpp_type
                if isinstance(item, dict):
                    yield from numbers(known[key if inner == FieldDescriptor.CPPTYPE_STRING else int(key)], item)
        elif isinstance(value, list):
            for known_item, item in zip(known, value, strict=True):
                yield from numbers(known_item, item)
        else:
            yield from numbers(known, value)


@given(message=messages())
def test_a_number_is_a_number(message: pb.ModelConfig) -> None:
    """Never a text, as protobuf has it for 64 bits (spec 3.7)."""
    wrong = [pair for pair in numbers(message, json_object(message)) if type(pair[1]) not in (int, float)]
    assert wrong == []


def test_what_a_configuration_looks_like() -> None:
    message = pb.ModelConfig(name="größe", max_batch_size=8)
    message.input.add(name="x", data_type=pb.TYPE_STRING, dims=[-1, 2**40])
    message.dynamic_batching.max_queue_delay_microseconds = 2**64 - 1
    message.dynamic_batching.priority_queue_policy[2**63].max_queue_size = 3
    control = message.model_warmup.add(name="first").inputs["x"]
    control.zero_data = False
    printed = json.loads(json_text(message))
    assert printed["input"] == [
        {
            "name": "x",
            "data_type": "TYPE_STRING",
            "format": "FORMAT_NONE",
            "dims": [-1, 2**40],
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": False,
            "is_non_linear_format_io": False,
        }
    ]
    assert printed["dynamic_batching"] == {
        "preferred_batch_size": [],
        "max_queue_delay_microseconds": 2**64 - 1,
        "preserve_ordering": False,
        "priority_levels": 0,
        "default_priority_level": 0,
        "priority_queue_policy": {
            str(2**63): {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": 0,
                "allow_timeout_override": False,
                "max_queue_size": 3,
            }
        },
    }
    assert printed["model_warmup"][0]["inputs"] == {
        "x": {"data_type": "TYPE_INVALID", "dims": [], "zero_data": False}
    }
    assert (printed["name"], printed["output"], printed["parameters"], printed["backend"]) == ("größe", [], {}, "")
    for absent in ("sequence_batching", "version_policy", "optimization", "response_cache"):
        assert absent not in printed


@pytest.mark.parametrize(
    ("number", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (0.1, 0.1)]
)
def test_numbers_of_32_bits(number: float, text: object) -> None:
    """JSON has no word for what is no number."""
    message = pb.ModelConfig()
    message.sequence_batching.direct.minimum_slot_utilization = number
    printed = json_object(message)["sequence_batching"]["direct"]
    assert printed["minimum_slot_utilization"] == text
    again = json_format.Parse(json_text(message), pb.ModelConfig()).sequence_batching.direct
    assert repr(again) == repr(message.sequence_batching.direct)


def test_a_number_that_its_enum_does_not_know() -> None:
    message = pb.ModelConfig.FromString(b"\x2a\x02\x10\x63")
    assert json_object(message)["input"][0]["data_type"] == 0x63
