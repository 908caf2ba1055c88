"""JSON text as TensorFlow Serving's parser takes it: every message with its offset, and no depth that hurts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.protocols.json.limits import DEFAULT_LIMITS, MAX_DEPTH, VALUE_COST
from triglot.protocols.tfserving.json_parser import MAX_RUN, parse, parse_object, signature_name_of
from triglot.protocols.tfserving.json_values import Object, Value


def plain(value: Value) -> Any:
    """What the standard parser makes of the same text; of equal keys the last one."""
    if isinstance(value, Object):
        return {key.decode(): plain(item) for key, item in value.members}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def error_of(text: bytes) -> str:
    with pytest.raises(InvalidArgument) as caught:
        parse(text)
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
    assert repr(plain(parse(text))) == repr(value)


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
    assert repr(plain(parse(text.encode()))) == repr(expected)


@given(st.binary(max_size=40) | st.lists(st.sampled_from(list(b'{}[]",:\\u0dD8e1-.NIa'))).map(bytes))
def test_any_bytes_are_read_or_refused_within_the_text(text: bytes) -> None:
    message = "at offset: 0"
    try:
        parse(text)
    except InvalidArgument as error:
        message = error.message
    if text:
        assert 0 <= int(message.rpartition("at offset: ")[2]) <= len(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "The document is empty"),
        (b"   ", "The document is empty. at offset: 3"),
        (b"\0{}", "The document is empty. at offset: 0"),
        (b"]", "The document is empty. at offset: 0"),
        (b" ,", "The document is empty. at offset: 1"),
        (b"instances = [1, 2]", "Invalid value. at offset: 0"),
        (b"not gzip", "Invalid value. at offset: 1"),
        (b"[nan]", "Invalid value. at offset: 2"),
        (b"[truE]", "Invalid value. at offset: 4"),
        (b"[", "Invalid value. at offset: 1"),
        (b"[1,]", "Invalid value. at offset: 3"),
        (b"[+1]", "Invalid value. at offset: 1"),
        (b"[.5]", "Invalid value. at offset: 1"),
        (b"[-]", "Invalid value. at offset: 2"),
        (b"[-x]", "Invalid value. at offset: 2"),
        (b"[NAN]", "Invalid value. at offset: 2"),
        (b"[Ifn]", "Invalid value. at offset: 2"),
        (b"[-Infinite]", "Invalid value. at offset: 9"),
        (b'{"a":}', "Invalid value. at offset: 5"),
        (b'{"a":', "Invalid value. at offset: 5"),
        (b"{", "Missing a name for object member. at offset: 1"),
        (b"{x:1}", "Missing a name for object member. at offset: 1"),
        (b"{'x':1}", "Missing a name for object member. at offset: 1"),
        (b'{"x":[1.0],}', "Missing a name for object member. at offset: 11"),
        (b'{"x" [1.0]}', "Missing a colon after a name of object member. at offset: 5"),
        (b'{"x"', "Missing a colon after a name of object member. at offset: 4"),
        (b'{"x":[1.0] "a":1}', "Missing a comma or '}' after an object member. at offset: 11"),
        (b'{"x":1', "Missing a comma or '}' after an object member. at offset: 6"),
        (b'{"x":1]', "Missing a comma or '}' after an object member. at offset: 6"),
        (b'{"x":1\0}', "Missing a comma or '}' after an object member. at offset: 6"),
        (b"[1.0", "Missing a comma or ']' after an array element. at offset: 4"),
        (b"[01]", "Missing a comma or ']' after an array element. at offset: 2"),
        (b"[0x10]", "Missing a comma or ']' after an array element. at offset: 2"),
        (b"[Infx]", "Missing a comma or ']' after an array element. at offset: 4"),
        (b"[1}", "Missing a comma or ']' after an array element. at offset: 2"),
        (b'"\\u00g0"', "Incorrect hex digit after \\u escape in string. at offset: 1"),
        (b'"\\u00', "Incorrect hex digit after \\u escape in string. at offset: 1"),
        (b'"a\\ud83d\\u12"', "Incorrect hex digit after \\u escape in string. at offset: 2"),
        (b'"\\ud800"', "The surrogate pair in string is invalid. at offset: 1"),
        (b'"\\ud83d\\n"', "The surrogate pair in string is invalid. at offset: 1"),
        (b'"\\ud83d\\u0041"', "The surrogate pair in string is invalid. at offset: 1"),
        (b'"ab\\x"', "Invalid escape character in string. at offset: 3"),
        (b'"\\', "Invalid escape character in string. at offset: 1"),
        (b'"a\nb"', "Invalid escape character in string. at offset: 2"),
        (b'["abc]', "Missing a closing quotation mark in string. at offset: 6"),
        (b'"a\0"', "Missing a closing quotation mark in string. at offset: 2"),
        (b"[1e309]", "Number too big to be stored in double. at offset: 1"),
        (b"[-1e400]", "Number too big to be stored in double. at offset: 1"),
        (b"[" + b"9" * 400 + b"]", "Number too big to be stored in double. at offset: 1"),
        (b"[1.]", "Miss fraction part in number. at offset: 3"),
        (b"[-0.e1]", "Miss fraction part in number. at offset: 4"),
        (b"[1e]", "Miss exponent in number. at offset: 3"),
        (b"[1E+]", "Miss exponent in number. at offset: 4"),
        (b"[1.5e-x]", "Miss exponent in number. at offset: 6"),
    ],
)
def test_errors_say_what_and_where(text: bytes, error: str) -> None:
    assert error_of(text) == error


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a":1} trailing }{ junk', Object([(b"a", 1)])),
        (b"\xef\xbb\xbf[1]", [1]),
        (b"\xbb\xbf1", 1),
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
        (b'"\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC"', b'"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac'),
        (b'"\\ud83d\\ude00\\u0000"', "😀\0".encode()),
        (b'"\\udc00"', b"\xed\xb0\x80"),
        (b'"\xff\xfe\x7f/"', b"\xff\xfe\x7f/"),
        (b'{"a":1,"a":2,"b":{}}', Object([(b"a", 1), (b"a", 2), (b"b", Object([]))])),
        (b'[[],{},"",[[]]]', [[], Object([]), b"", [[]]]),
    ],
)
def test_what_differs_from_strict_json(text: bytes, value: Value) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


def test_minus_zero_keeps_its_sign_as_a_float_only() -> None:
    assert [str(value) for value in (parse(b"-0"), parse(b"-0.0"), parse(b"-0e0"))] == ["0", "-0.0", "-0.0"]


@pytest.mark.parametrize("text", [b"NaN", b"-NaN", b"[NaN]"])
def test_nan_is_a_number(text: bytes) -> None:
    value = parse(text)
    assert math.isnan(value[0] if isinstance(value, list) else value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_deep_nesting_is_read_up_to_the_limit(opening: bytes, closing: bytes) -> None:
    depth = MAX_DEPTH // len(closing)
    assert parse(opening * depth + b"7" + closing * depth)
    for deeper in (depth + 1, 200_000):
        text = opening * deeper + b"7" + closing * deeper
        assert "nested" in error_of(text)
    assert "Missing a comma" in error_of(opening * depth + b"7" + closing[:1] * (depth - 1))
    assert error_of(opening * depth) in {
        f"Invalid value. at offset: {depth * len(opening)}",
        f"Missing a name for object member. at offset: {depth * len(opening)}",
    }


def test_too_many_values_are_refused_before_any_is_read() -> None:
    with pytest.raises(PayloadTooLarge, match="option max_json_values"):
        parse(b"[" + b"," * (DEFAULT_LIMITS.values // VALUE_COST))
    with pytest.raises(PayloadTooLarge, match="option max_json_size"):
        parse(b" " * (DEFAULT_LIMITS.size + 1))


@pytest.mark.parametrize("length", [MAX_RUN - 1, MAX_RUN, MAX_RUN + 1, 5 * MAX_RUN])
def test_long_strings_are_few_values(length: int) -> None:
    text = b"," * length
    assert parse(b'["%b\\n%b"]' % (text, text)) == [text + b"\n" + text]
    for end in (b"\x01", b"\\x", b""):
        with pytest.raises(InvalidArgument, match=f"at offset: {length + 2}"):
            parse(b'["%b%b' % (text, end))


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (b"[1,2]", "[1, 2]"),
        (b"1.5", "1.5"),
        (b'"a"', '"a"'),
        (b"null", "null"),
    ],
)
def test_a_body_is_an_object(text: bytes, quoted: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_object(text)
    assert caught.value.message == f"JSON Value: {quoted} Is not object"


def test_the_first_of_equal_keys_counts() -> None:
    body = parse_object(b'{"a":1,"b":2,"a":3}')
    assert body.first() == {b"a": 1, b"b": 2}


def test_a_signature_name_is_a_string() -> None:
    assert signature_name_of(parse_object(b'{"signature_name":"s","signature_name":1}')) == "s"
    assert signature_name_of(parse_object(b"{}")) == ""
    with pytest.raises(InvalidArgument) as caught:
        signature_name_of(parse_object(b'{"signature_name":100}'))
    assert caught.value.message == (
        'JSON Value: {\n    "signature_name": 100\n} not formatted correctly. '
        "'signature_name' key must be a string value."
    )
