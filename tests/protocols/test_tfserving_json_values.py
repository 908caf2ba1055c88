"""How values, strings and numbers are quoted and printed, and base64."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument
from triglot.protocols.json.dialect import MAX_DEPTH
from triglot.protocols.tfserving.json_dialect import TFSERVING
from triglot.protocols.tfserving.json_printer import (
    QUOTED_BYTES,
    base64_text,
    debug_text,
    decimal_texts,
    decode_base64,
    json_type,
    quote,
    shortest_text,
)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (b"{}", "{}"),
        (b"[]", "[]"),
        (b"[[1,2],[]]", "[[1, 2], []]"),
        (
            b'{"a":{"b":[1.0,true,null]},"c":"d"}',
            '{\n    "a": {\n        "b": [1.0, true, null]\n    },\n    "c": "d"\n}',
        ),
        (b'{"a":[{"b":1},{}]}', '{\n    "a": [{\n            "b": 1\n        }, {}]\n}'),
        (b'"\\u0001\\n\\"/\\u007f"', '"\\u0001\\n\\"/\x7f"'),
        (b'"\xff"', '"�"'),
        (b"18446744073709551616", "18446744073709553000.0"),
        (b"-0", "0"),
        (b"-0.0", "-0.0"),
        # A number that RapidJSON's writer does not print ends the text.
        (b"NaN", ""),
        (b"[1,2,NaN,3]", "[1, 2, "),
        (b'{"a":Infinity,"b":1}', '{\n    "a": '),
    ],
)
def test_values_are_quoted(text: bytes, quoted: str) -> None:
    assert debug_text(TFSERVING.read(text)) == quoted


def test_a_quoted_value_ends_with_the_token_that_reaches_the_limit() -> None:
    long = "y" * 300
    assert debug_text(TFSERVING.read(json.dumps({"a": long, "b": 1}).encode())) == '{\n    "a": "' + long + '"'
    numbers = debug_text(list(range(1000)))
    assert QUOTED_BYTES <= len(numbers) < QUOTED_BYTES + 5
    assert ("[" + ", ".join(map(str, range(1000)))).startswith(numbers)
    assert debug_text(["y" * 253, 1]) == '["' + "y" * 253 + '"'
    assert debug_text(["y" * 252]) == '["' + "y" * 252 + '"]'


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_no_depth_makes_quoting_long(opening: bytes) -> None:
    closing = opening.translate(bytes.maketrans(b"[{", b"]}"), b'"a:')[::-1]
    depth = MAX_DEPTH // len(closing)
    value = TFSERVING.read(opening * depth + b"1" + closing * depth)
    assert len(debug_text(value)) < 2 * QUOTED_BYTES


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.sampled_from(["", "é", 'a"\\\n', 1.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_a_quoted_value_is_json(value: Any) -> None:
    text = debug_text(TFSERVING.read(json.dumps(value).encode()))
    if len(text.encode()) < QUOTED_BYTES:
        assert json.loads(text) == value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "Null"),
        (True, "True"),
        (False, "False"),
        (1, "Number"),
        (1.5, "Number"),
        ("", "String"),
        ([], "Array"),
        ({}, "Object"),
    ],
)
def test_types_have_names(value: Any, name: str) -> None:
    assert json_type(value) == name


def test_strings_escape_what_must_be() -> None:
    assert quote(bytes(range(0x20))) == (
        b'"' + b"".join([b"\\u%04X" % code for code in range(8)]) + b"\\b\\t\\n\\u000B\\f\\r"
        b"" + b"".join([b"\\u%04X" % code for code in range(14, 32)]) + b'"'
    )
    assert quote(b'"\\/\x7f\xc3\xa9\xff') == b'"\\"\\\\/\x7f\xc3\xa9\xff"'


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_quoted_number_is_the_number(value: float) -> None:
    text = shortest_text(value)
    assert float(text) == value
    assert len(text.strip(b"-0.").split(b"e")[0]) <= 18
    assert math.copysign(1, float(text)) == math.copysign(1, value)


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("3fb999999999999a", b"0.1"),
        ("4059000000000000", b"100.0"),
        ("43f0000000000000", b"18446744073709553000.0"),
        ("444b1ae4d6e2ef50", b"1e21"),
        ("0000000000000001", b"5e-324"),
        ("7fefffffffffffff", b"1.7976931348623157e308"),
        ("3eb0c6f7a0b5ed8d", b"0.000001"),
        ("3e7ad7f29abcaf48", b"1e-7"),
        ("be55668178139c8e", b"-1.9930687771097389e-8"),
        ("3e8ddc0306436ba8", b"2.2247002385327684e-7"),
        ("3eaf8695e39148f8", b"9.39539808739766e-7"),
    ],
)
def test_quoted_numbers_have_the_digits_of_rapidjson(bits: str, text: bytes) -> None:
    assert shortest_text(struct.unpack(">d", bytes.fromhex(bits))[0]) == text


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        ("f4", 1, "1.0"),
        ("f4", 0.5, "0.5"),
        ("f4", 9e6, "9e+06"),
        ("f4", 3e-5, "3e-05"),
        ("f4", 555557.5, "555557.5"),
        ("f4", 0.1234567, "0.123456702"),
        ("f4", 0.1, "0.1"),
        ("f4", 16777217, "16777216.0"),
        ("f4", 1e-7, "1e-07"),
        ("f4", 123456789, "123456792.0"),
        ("f4", -0.0, "-0.0"),
        ("f4", 3.14159274, "3.14159274"),
        ("f4", 1435774380, "1.43577434e+09"),
        ("f4", 1 / 3, "0.333333343"),
        ("f4", np.finfo("f4").max, "3.40282347e+38"),
        ("f8", np.finfo("f8").max, "1.7976931348623157e+308"),
        ("f4", math.nan, "NaN"),
        ("f4", math.inf, "Infinity"),
        ("f4", -math.inf, "-Infinity"),
        ("f8", 1 / 3, "0.33333333333333331"),
        ("f8", 0.1 + 0.2, "0.30000000000000004"),
        ("f8", 1e300, "1e+300"),
        ("f8", 0.1, "0.1"),
        ("f8", 2**53, "9007199254740992.0"),
        ("f8", math.nan, "NaN"),
    ],
)
def test_numbers_of_answers(dtype: str, value: float, text: str) -> None:
    assert decimal_texts(np.array([value], dtype)) == [text.encode()]


@given(
    st.lists(st.floats(width=32) | st.floats(width=32, min_value=-1, max_value=1)), st.sampled_from(["f4", "f8"])
)
def test_numbers_of_answers_are_the_values(values: list[float], dtype: str) -> None:
    array = np.array(values, dtype)
    texts = [text.decode() for text in decimal_texts(array)]
    assert all("." in text or "e" in text or text.strip("-") in ("NaN", "Infinity") for text in texts)
    assert (
        np.array([float(text) for text in texts]).astype(dtype).tobytes() == array.tobytes()
        or np.isnan(array).any()
    )
    np.testing.assert_array_equal(np.array([float(text) for text in texts]).astype(dtype), array)


@given(st.binary(max_size=20), st.integers(0, 3))
def test_base64_is_read_padded_or_not(data: bytes, blanks: int) -> None:
    text = base64.b64encode(data).decode()
    for given_text in (
        text,
        text.rstrip("="),
        text.replace("=", "."),
        (" \n" * blanks).join(["", text, ""]),
    ):
        assert decode_base64(given_text) == data


@pytest.mark.parametrize(
    ("text", "data"),
    [("", b""), ("aGVs bG8=", b"hello"), ("YR==", b"a"), ("YWJ=\n", b"ab"), ("\v\f", b""), ("YWI.", b"ab")],
)
def test_base64_oddities(text: str, data: bytes) -> None:
    assert decode_base64(text) == data


@pytest.mark.parametrize(
    "text",
    ["YQ=", "Y", "Y===", "YWJj=", "=", "====", "_-==", "YQ==YQ==", "Y\0==", "é==", "YWJj=Y=="],
)
def test_what_is_no_base64(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_base64(text)
    assert caught.value.message == "Unable to base64 decode"


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (b'{"b64":"YQ=="}', "YQ=="),
        (b'{"b64":"a","c":1}', None),
        (b'{"b64":1}', None),
        (b'{"B64":"a"}', None),
        (b'"b64"', None),
    ],
)
def test_which_objects_are_strings(text: bytes, inner: str | None) -> None:
    assert base64_text(TFSERVING.read(text)) == inner
