"""`:classify` and `:regress` bodies: the examples that they make."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument, PayloadTooLarge, ServingError
from triglot.pb.tfserving.example_pb2 import Example
from triglot.protocols.tfserving.rest_examples import decode_examples

Features = dict[str, tuple[str | None, list[Any]]]


def examples(body: bytes | str) -> list[Features]:
    """The features of each example: kind and values."""
    decoded = decode_examples(body.encode() if isinstance(body, str) else body)
    return [features(Example.FromString(data)) for data in decoded.examples]


def features(example: Example) -> Features:
    found: Features = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        found[name] = (kind, list(getattr(feature, kind).value) if kind else [])
    return found


@pytest.mark.parametrize(
    ("value", "kind", "values"),
    [
        ("1.5", "float_list", [1.5]),
        ("1e2", "float_list", [100.0]),
        ("[1.0,2.5]", "float_list", [1.0, 2.5]),
        ("[-Infinity,Inf]", "float_list", [-math.inf, math.inf]),
        ("1e39", "float_list", [math.inf]),
        ("0.1", "float_list", [float(np.float32(0.1))]),
        ("18446744073709551616", "float_list", [2.0**64]),
        ("1", "int64_list", [1]),
        ("-0", "int64_list", [0]),
        ("[1,-9223372036854775808]", "int64_list", [1, -(2**63)]),
        ("[true,false,3]", "int64_list", [1, 0, 3]),
        ('"a"', "bytes_list", [b"a"]),
        ('["a",{"b64":"YQ=="},"é"]', "bytes_list", [b"a", b"a", "é".encode()]),
        ('{"b64":"YWI"}', "bytes_list", [b"ab"]),
        ("[]", None, []),
    ],
)
def test_tokens_decide_the_kind(value: str, kind: str | None, values: list[Any]) -> None:
    assert examples(f'{{"examples":[{{"x":{value}}},{{}}]}}') == [{"x": (kind, values)}, {}]


def test_nan_is_a_float() -> None:
    [found] = examples('{"examples":[{"x":[NaN]}]}')
    assert math.isnan(found["x"][1][0])


def test_strings_are_bytes() -> None:
    assert examples(b'{"examples":[{"x":"\xff"}]}') == [{"x": ("bytes_list", [b"\xff"])}]


def test_of_equal_features_the_last_one_counts() -> None:
    assert examples('{"examples":[{"x":1,"y":2,"x":["a"]}]}') == [
        {"x": ("bytes_list", [b"a"]), "y": ("int64_list", [2])}
    ]


def test_an_example_overrides_its_context() -> None:
    body = '{"context":{"x":9.0,"y":1},"examples":[{"x":1.0},{}]}'
    assert examples(body) == [
        {"x": ("float_list", [1.0]), "y": ("int64_list", [1])},
        {"x": ("float_list", [9.0]), "y": ("int64_list", [1])},
    ]


def test_the_signature_is_named() -> None:
    assert decode_examples(b'{"examples":[{}]} x').signature_name == ""
    assert decode_examples(b'{"signature_name":"s","examples":[{}],"signature_name":1}').signature_name == "s"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "JSON Parse error: The document is empty"),
        ("[]", "JSON Value: [] Is not object"),
        ("{}", "JSON Value: {} When method is classify, key 'examples' is expected and was not found"),
        (
            '{"context":{"q":"pizza"}}',
            'JSON Value: {\n    "context": {\n        "q": "pizza"\n    }\n} '
            "When method is classify, key 'examples' is expected and was not found",
        ),
        (
            '{"instances":[1.0]}',
            'JSON Value: {\n    "instances": [1.0]\n} '
            "When method is classify, key 'examples' is expected and was not found",
        ),
        (
            '{"examples":{}}',
            "JSON Value: {\n    \"examples\": {}\n} Expecting 'examples' value to be an list/array",
        ),
        ('{"examples":[]}', "JSON Value: {\n    \"examples\": []\n} 'examples' value is an empty array"),
        (
            '{"signature_name":[],"context":1}',
            'JSON Value: {\n    "signature_name": [],\n    "context": 1\n} not formatted correctly. '
            "'signature_name' key must be a string value.",
        ),
        ('{"context":[1],"examples":[{"x":1.0}]}', "Example must be JSON object but got JSON Array"),
        ('{"context":1}', "Example must be JSON object but got JSON Number"),
        ('{"examples":[{},"a"]}', "Example must be JSON object but got JSON String"),
        ('{"examples":[{"x":null}]}', "Feature: x has element with unexpected JSON type: Null"),
        ('{"examples":[{"x":[[1]]}]}', "Feature: x has element with unexpected JSON type: Array"),
        ('{"examples":[{"x":{"b64":1}}]}', "Feature: x has element with unexpected JSON type: Object"),
        ('{"examples":[{"x":[1,2.0]}]}', "Unexpected element type in feature: x expecting type: int64"),
        ('{"examples":[{"x":[1.0,2]}]}', "Unexpected element type in feature: x expecting type: float"),
        ('{"examples":[{"x":[1.0,true]}]}', "Unexpected element type in feature: x expecting type: float"),
        ('{"examples":[{"x":["a",1]}]}', "Unexpected element type in feature: x expecting type: bytes"),
        ('{"examples":[{"x":[1,{"b64":"!"}]}]}', "Unexpected element type in feature: x expecting type: int64"),
        (
            '{"examples":[{"x":[20,18446744073709551603]}]}',
            "Feature: x has uint64_t element. Only int64_t is supported.",
        ),
        ('{"examples":[{"x":{"b64":"!"}}]}', "Unable to base64 decode"),
    ],
)
def test_what_is_wrong_with_a_body(body: str, error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_examples(body.encode())
    assert caught.value.message == error


def test_a_feature_has_a_name_in_utf8() -> None:
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        decode_examples(b'{"examples":[{"\xff":1}]}')


def test_a_context_is_not_copied_without_end() -> None:
    body = json.dumps({"context": {"x": "a" * 100_000}, "examples": [{}] * 1000})
    with pytest.raises(PayloadTooLarge):
        decode_examples(body.encode())


FEATURES = st.dictionaries(
    st.text(max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3)
    | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3)
    | st.lists(st.text(max_size=3), min_size=1, max_size=3),
    max_size=3,
)


@given(st.lists(FEATURES, min_size=1, max_size=3))
def test_what_was_written_is_read(written: list[dict[str, list[Any]]]) -> None:
    read = examples(json.dumps({"examples": written}))
    plain = [
        {
            name: [item.decode() if isinstance(item, bytes) else item for item in values]
            for name, (_, values) in example.items()
        }
        for example in read
    ]
    assert repr([dict(sorted(example.items())) for example in plain]) == repr(
        [dict(sorted(example.items())) for example in written]
    )


@given(st.lists(st.sampled_from(list(b'{}[]",:1.xtb64'))).map(bytes))
def test_any_bytes_are_read_or_refused(junk: bytes) -> None:
    for body in (junk, b'{"examples":[{"x":' + junk + b"}]}", b'{"context":' + junk + b',"examples":[{}]}'):
        with suppress(ServingError):
            assert decode_examples(body).examples
