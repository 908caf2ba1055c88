"""JSON text as TensorFlow Serving takes it: its messages, and what it reads besides strict JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.protocols.json.dialect import DEFAULT_LIMITS, VALUE_COST
from triglot.protocols.json.text import read_object
from triglot.protocols.tfserving.json_dialect import EXAMPLES, TFSERVING
from triglot.protocols.tfserving.json_printer import raw, signature_name_of

pytestmark = pytest.mark.usefixtures("json_library")


def error_of(text: bytes) -> str:
    with pytest.raises(InvalidArgument) as caught:
        TFSERVING.read(text)
    return caught.value.message.removeprefix("JSON Parse error: ")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_what_was_written_is_read(value: Any, ascii_only: bool, indent: int | str | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert repr(TFSERVING.read(text)) == repr(value)


def integer(digits: str) -> int | float:
    """The number of an integer's text; beyond 64 bits it is a float."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else float(number)


@given(st.text(alphabet='{}[]",:0123456789.eE+-ntrufalse\\ Infiy\x00é', max_size=30))
def test_any_text_that_the_standard_parser_takes_is_read_alike(text: str) -> None:
    try:
        expected = json.loads(text, parse_int=integer)
    except ValueError:
        return
    if "inf" in repr(expected):
        return  # It reads 1e999 as infinity.
    assert repr(TFSERVING.read(text.encode())) == repr(expected)


@given(st.binary(max_size=40) | st.lists(st.sampled_from(list(b'{}[]",:\\u0dD8e1-.NIa'))).map(bytes))
def test_any_bytes_are_read_or_refused_within_the_text(text: bytes) -> None:
    try:
        TFSERVING.read(text)
    except InvalidArgument as error:
        offset = re.search(r"at offset: (\d+)$", error.message)
        assert not text or (offset is not None and int(offset[1]) <= len(text))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "The document is empty"),
        (b"   ", "The document is empty."),
        (b"\0{}", "The document is empty."),
        (b"]", "The document is empty."),
        (b" ,", "The document is empty."),
        (b"instances = [1, 2]", "Invalid value."),
        (b"not gzip", "Invalid value."),
        (b"[nan]", "Invalid value."),
        (b"[truE]", "Invalid value."),
        (b"[", "Invalid value."),
        (b"[1,]", "Invalid value."),
        (b"[+1]", "Invalid value."),
        (b"[.5]", "Invalid value."),
        (b"[-]", "Invalid value."),
        (b"[-x]", "Invalid value."),
        (b"[NAN]", "Invalid value."),
        (b"[Ifn]", "Invalid value."),
        (b'{"a":}', "Invalid value."),
        (b'{"a":', "Invalid value."),
        (b"{", "Missing a name for object member."),
        (b"{x:1}", "Missing a name for object member."),
        (b"{'x':1}", "Missing a name for object member."),
        (b'{"x":[1.0],}', "Missing a name for object member."),
        (b'{"x" [1.0]}', "Missing a colon after a name of object member."),
        (b'{"x"', "Missing a colon after a name of object member."),
        (b'{"x":[1.0] "a":1}', "Missing a comma or '}' after an object member."),
        (b'{"x":1', "Missing a comma or '}' after an object member."),
        (b'{"x":1]', "Missing a comma or '}' after an object member."),
        (b'{"x":1\0}', "Missing a comma or '}' after an object member."),
        (b"[1.0", "Missing a comma or ']' after an array element."),
        (b"[01]", "Missing a comma or ']' after an array element."),
        (b"[0x10]", "Missing a comma or ']' after an array element."),
        (b"[Infx]", "Missing a comma or ']' after an array element."),
        (b"[1}", "Missing a comma or ']' after an array element."),
        (b'"\\u00g0"', "Incorrect hex digit after \\u escape in string."),
        (b'"\\u00', "Incorrect hex digit after \\u escape in string."),
        (b'"a\\ud83d\\u12"', "Incorrect hex digit after \\u escape in string."),
        (b'"\\ud800"', "The surrogate pair in string is invalid."),
        (b'"\\ud83d\\n"', "The surrogate pair in string is invalid."),
        (b'"\\ud83d\\u0041"', "The surrogate pair in string is invalid."),
        (b'"ab\\x"', "Invalid escape character in string."),
        (b'"\\', "Missing a closing quotation mark in string."),
        (b'"a\nb"', "Invalid escape character in string."),
        (b'["abc]', "Missing a closing quotation mark in string."),
        (b'"a\0"', "Invalid escape character in string."),
        (b"[1e309]", "Number too big to be stored in double."),
        (b"[-1e400]", "Number too big to be stored in double."),
        (b"[" + b"9" * 400 + b"]", "Number too big to be stored in double."),
        (b"[1.]", "Miss fraction part in number."),
        (b"[-0.e1]", "Miss fraction part in number."),
        (b"[1e]", "Miss exponent in number."),
        (b"[1E+]", "Miss exponent in number."),
        (b"[1.5e-x]", "Miss exponent in number."),
    ],
)
def test_errors_say_what_as_tensorflow_serving_does(text: bytes, error: str) -> None:
    assert error_of(text).partition(" at offset: ")[0] == error


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        (b"  ", 2),
        (b'{"\xc3\xa9":}', 6),
        (b'{"a":1 "b":2}', 7),
        (b'{"a":1,}', 7),
        (b'{"a":1.}', 7),
        (b'["a', 3),
        (b'{"a":1e999}', 5),
    ],
)
def test_errors_say_where_in_bytes(text: bytes, offset: int) -> None:
    assert error_of(text).partition(" at offset: ")[2] == str(offset)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a":1} trailing }{ junk', {"a": 1}),
        (b"\xef\xbb\xbf[1]", [1]),
        (b" \t\r\n[ 1 , 2 ] ", [1, 2]),
        (b"-0", 0),
        (b"-9223372036854775808", -(2**63)),
        (b"-9223372036854775809", -float(2**63)),
        (b"18446744073709551615", 2**64 - 1),
        (b"18446744073709551616", float(2**64)),
        (b"1" * 30, float("1" * 30)),
        (b"1E2", 100.0),
        (b"1e-400", 0.0),
        (b"Inf", math.inf),
        (b"-Infinity", -math.inf),
        (b"-Inf", -math.inf),
        (b'"\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC"', '"\\/\b\f\n\r\tAé€'),
        (b'"\\ud83d\\ude00\\u0000"', "😀\0"),
        (b'"\xff\xfe\x7f/"', "\udcff\udcfe\x7f/"),
        (b'{"a":1,"a":2,"b":{}}', {"a": 1, "b": {}}),
        (b'[[],{},"",[[]]]', [[], {}, "", [[]]]),
    ],
)
def test_what_differs_from_strict_json(text: bytes, value: Any) -> None:
    assert TFSERVING.read(text) == value
    assert type(TFSERVING.read(text)) is type(value)


def test_strings_that_are_not_utf8_keep_their_bytes() -> None:
    assert raw(TFSERVING.read(b'"\xff\xfe\xc3\xa9"')) == b"\xff\xfe\xc3\xa9"


def test_minus_zero_keeps_its_sign_as_a_float_only() -> None:
    assert [str(TFSERVING.read(text)) for text in (b"-0", b"-0.0", b"-0e0")] == ["0", "-0.0", "-0.0"]


@pytest.mark.parametrize("text", [b"NaN", b"-NaN"])
def test_nan_is_a_number(text: bytes) -> None:
    assert math.isnan(TFSERVING.read(text))


def test_names_of_tokens_in_strings_are_left_alone() -> None:
    assert TFSERVING.read(b'{"Inf":["-NaN","a\\"Inf",Inf]} Inf') == {"Inf": ["-NaN", 'a"Inf', math.inf]}


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_deep_nesting_is_read_up_to_a_limit(opening: bytes, closing: bytes) -> None:
    for depth in (900 // len(closing), 1100, 200_000):
        for rest in (b"", b"}"):
            text = opening * depth + b"7" + closing * depth + rest
            if depth <= 900:
                assert TFSERVING.read(text)
            else:
                assert "nested too deep" in error_of(text)
            assert "Missing a comma" in error_of(text[:-9]) or depth > 900


def test_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(PayloadTooLarge, match="option max_json_values"):
        read_object(b"[" + b"1," * (DEFAULT_LIMITS.values // VALUE_COST) + b"1]", DEFAULT_LIMITS, TFSERVING)
    with pytest.raises(PayloadTooLarge, match="option max_json_size"):
        read_object(b" " * (DEFAULT_LIMITS.size + 1), DEFAULT_LIMITS, TFSERVING)


@pytest.mark.parametrize(
    ("text", "quoted"), [(b"[1,2]", "[1, 2]"), (b"1.5", "1.5"), (b'"a"', '"a"'), (b"null", "null")]
)
def test_a_body_is_an_object(text: bytes, quoted: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_object(text, DEFAULT_LIMITS, TFSERVING)
    assert caught.value.message == f"JSON Value: {quoted} Is not object"


def test_of_equal_features_the_last_one_counts_and_of_the_bodys_members_the_first() -> None:
    text = b'{"examples":[{"x":1,"x":2}],"signature_name":"a","signature_name":"b"}'
    assert EXAMPLES.read(text) == {"examples": [{"x": 2}], "signature_name": "a"}
    assert TFSERVING.read(text) == {"examples": [{"x": 1}], "signature_name": "a"}


def test_a_signature_name_is_a_string() -> None:
    assert signature_name_of({"signature_name": "s"}) == "s"
    assert signature_name_of({"signature_name": None}) == signature_name_of({}) == ""
    with pytest.raises(InvalidArgument) as caught:
        signature_name_of({"signature_name": 100})
    assert caught.value.message == (
        'JSON Value: {\n    "signature_name": 100\n} not formatted correctly. '
        "'signature_name' key must be a string value."
    )
