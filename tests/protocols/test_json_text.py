"""JSON bodies with large arrays: exact on the quick path and on the slow one, and the same on both."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.core.tensor import Array, object_array
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.dialect import JsonLimits, type_name
from triglot.protocols.json.text import CHUNK, LARGE_FROM_BYTES, flatten, print_array, print_nested, read_body

pytestmark = pytest.mark.usefixtures("json_library")

Body = dict[str, Any]
BLANKS = b" " * LARGE_FROM_BYTES


def read(body: bytes | str, reader: Callable[[Body], Any] = lambda body: body) -> list[Any]:
    """What `reader` makes of the body, small and large."""
    text = body.encode() if isinstance(body, str) else body
    return [read_body(text, "data", reader), read_body(text + BLANKS, "data", reader)]


def plain(value: Any) -> Any:
    """The body as it is; a large array is refused, as by a reader that wants no numbers."""
    if isinstance(value, LargeArray):
        raise TypeError("not numbers")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def same(first: Any, other: Any) -> bool:
    """Equal, in type too; NaN is equal to itself."""
    return repr(first) == repr(other)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(["data", "a", "é", "shape"]), VALUES, max_size=4)


@given(BODIES)
def test_both_paths_read_what_was_written(body: Body) -> None:
    for text in (json.dumps(body), json.dumps(body, ensure_ascii=False)):
        small, large = read(text, plain)
        assert same(small, body)
        assert same(large, body)


@given(st.text(alphabet='{}[]",:0123456789.eE+-ntfaN\\ Infiy\x00é', max_size=30))
def test_any_text_is_read_as_the_standard_parser_does_or_refused(text: str) -> None:
    if re.search(r"\d{19}", text):
        return  # See test_integers_beyond_64_bits.
    for body in (text, '{"data":' + text + "}", '{"data":[' + text + "]}"):
        try:
            expected = json.loads(body)
        except ValueError:
            expected = None
        for size in (b"", BLANKS):
            try:
                value = read_body(body.encode() + size, "data", plain)
            except InvalidArgument:
                assert not isinstance(expected, dict), body
            else:
                assert same(value, expected), body


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for body in (data, data + BLANKS, b'{"data":"' + data + b'"}' + BLANKS):
        with suppress(InvalidArgument):
            assert isinstance(read_body(body, "data", plain), dict)


def test_large_arrays_stay_in_the_parsers_memory() -> None:
    kinds: list[type] = []

    def reader(body: Body) -> None:
        kinds.append(type(body["inputs"][0]["data"]))

    numbers = ",".join(map(str, range(LARGE_FROM_BYTES)))
    read_body(f'{{"inputs":[{{"name":"x","data":[{numbers}]}}]}}'.encode(), "data", reader)
    assert kinds == [LargeArray]


def test_only_arrays_under_the_key_are_large() -> None:
    body = read_body(b'{"data":{"data":1},"other":[1,{"a":[2]}]}' + BLANKS, "data", lambda body: body)
    assert body == {"data": {"data": 1}, "other": [1, {"a": [2]}]}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{", "Expecting property name enclosed in double quotes"),
        ('{"a":1}x', "Extra data"),
        ('{"a":01}', "Expecting ',' delimiter"),
        ("[]", "expected an object, got an array"),
        ('"a"', "expected an object, got a string"),
        ("7", "expected an object, got a number"),
        ("true", "expected an object, got a boolean"),
        ("null", "expected an object, got null"),
        ('{"a":"\xff"}'.encode("latin-1"), "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_no_json_object(text: bytes | str, what: str) -> None:
    body = text.encode() if isinstance(text, str) else text
    for request in (body, body + BLANKS):
        with pytest.raises(InvalidArgument) as caught:
            read_body(request, "data", plain)
        # Where the text ends is told by its length.
        assert caught.value.message.startswith(
            f"failed to parse the request JSON: {what.split(':', maxsplit=1)[0]}"
        )


def outermost(body: Body) -> None:
    for value in body.values():
        if isinstance(value, LargeArray):
            value.numbers("d")


@pytest.mark.parametrize("depth", [500, 900, 1000, 1020, 1100, 5000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"data":', "}]")])
@pytest.mark.parametrize("key", ["data", "other"])
def test_deep_nesting_is_read_or_refused(depth: int, opening: str, closing: str, key: str) -> None:
    text = f'{{"{key}":{opening * depth}1{closing * depth}}}'.encode()
    for body in (text, text + BLANKS):
        text_of_error = ""
        try:
            read_body(body, "data", outermost)
        except InvalidArgument as error:
            text_of_error = error.message
        assert text_of_error in ("", "failed to parse the request JSON: nested too deep")
        levels = depth * len(closing)
        assert levels > 900 or not text_of_error
        assert levels < 1100 or text_of_error


TOKENS = "[NaN,Infinity,-Infinity,1.5,-0.0,7]"
VALUES_OF_TOKENS = [math.nan, math.inf, -math.inf, 1.5, -0.0, 7]


def floats(body: Body) -> list[float]:
    data = body["data"]
    array = data.numbers("d") if isinstance(data, LargeArray) else np.array(data, "f8")
    values: list[float] = array.ravel().tolist()
    return values


@pytest.mark.parametrize(
    "text",
    [
        f'{{"data":{TOKENS}}}',
        f'{{"data":[{TOKENS},{TOKENS}]}}',
        f'{{"NaN":"Infinity","data":{TOKENS}}}',
        f'{{"a":"\\"NaN","data":{TOKENS}}}',
        f'{{"a":"NaN \\\\","data":{TOKENS}}}',
        f'{{"a":NaN,"data":{TOKENS}}}',
        f'{{"data":[1],"data":{TOKENS}}}',
    ],
)
def test_tokens_beyond_json(text: str) -> None:
    for values in read(text, floats):
        assert same(values, [float(value) for value in VALUES_OF_TOKENS] * (len(values) // 6))


@pytest.mark.parametrize(
    "number", ["1.7976931348623153e308", "-1.7976931348623153e308", "-1.7976931348623151e308"]
)
@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_numbers_next_to_the_largest_are_never_taken_for_tokens(number: str, token: str) -> None:
    for text in (
        f'{{"data":[{number},1]}}',
        f'{{"data":[{number},{token}]}}',
        f'{{"k":{token},"data":[{number},1]}}',
        f'{{"k":{number},"data":[{token},1]}}',
    ):
        for values in read(text, lambda body: (floats(body), plain(body).get("k"))):
            assert same(values[0], [float(value) for value in json.loads(text)["data"]])
            assert same(values[1], json.loads(text).get("k"))


@pytest.mark.parametrize(
    "text", ["1NaN", "NaN1", "0Infinity", "-NaN", "--Infinity", "Infinity.5", "NaNe5", "nan", "Inf"]
)
def test_tokens_within_other_text(text: str) -> None:
    for body in (f'{{"data":[{text}]}}', f'{{"data":[{text},NaN]}}'):
        for size in ("", " " * LARGE_FROM_BYTES):
            with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
                read_body((body + size).encode(), "data", floats)


INTEGERS = [2**63 - 1, -(2**63), 2**53 + 1, 0, -1]
UNSIGNED = [2**64 - 1, 2**63, 2**53 + 1, 0]


@pytest.mark.parametrize(
    ("values", "kind", "dtype"),
    [(INTEGERS, "i", "i8"), (UNSIGNED, "u", "u8"), ([0.1, 5e-324, 1e308, 7], "d", "f8")],
)
def test_numbers_are_exact(values: list[Any], kind: str, dtype: str) -> None:
    def reader(body: Body) -> Array:
        data = body["data"]
        return data.numbers(kind) if isinstance(data, LargeArray) else np.array(data, dtype)

    for array in read(json.dumps({"data": values}), reader):
        assert array.dtype == dtype
        assert array.tolist() == values
    for body in read(json.dumps({"k": values})):
        assert same(body, {"k": values})


@pytest.mark.parametrize("values", [[2**64], [-(2**63) - 1], [10**400], [2**64, math.nan]])
def test_integers_beyond_64_bits(values: list[Any]) -> None:
    text = json.dumps({"data": values, "k": values[0]})
    small, large = read(text, plain)
    # The nearest float will do, since no datatype has such an integer; refusals see the integer itself.
    assert small["data"] == pytest.approx(values, nan_ok=True)
    assert large["data"] == pytest.approx(values, nan_ok=True)


def test_a_refusal_of_the_readers_is_final() -> None:
    seen: list[Any] = []

    def reader(body: Body) -> None:
        seen.append(type(body["data"]))
        raise InvalidArgument("no")

    for body in (b'{"data":[1]}', b'{"data":[1]}' + BLANKS):
        with pytest.raises(InvalidArgument, match="no"):
            read_body(body, "data", reader)
    assert seen == [list, LargeArray]


def test_a_reader_that_wants_no_numbers_is_given_lists() -> None:
    body = b'{"data":[1]}' + BLANKS
    assert read_body(body, "data", plain) == {"data": [1]}


def test_more_elements_than_the_parser_can_count_are_still_right() -> None:
    """Its length saturates at 2**24 - 1: a long list goes through it in pieces."""
    count = 2**24 + 5
    text = b'{"data":[' + b"0," * (count - 1) + b"1]}"
    numbers = read_body(text, "data", lambda body: body["data"].numbers("i"), JsonLimits(values=count))
    assert numbers.size == count
    assert numbers.sum() == numbers[-1] == 1
    with pytest.raises(PayloadTooLarge, match="option max_json_values"):
        read_body(text, "data", plain)
    with pytest.raises(PayloadTooLarge, match="option max_json_values"):
        read_body(text, "other", plain, JsonLimits(values=count))


@given(st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=4), max_leaves=20).map(lambda x: [x]))
def test_flatten(values: list[Any]) -> None:
    text = json.dumps(values).replace("[", " ").replace("]", " ").replace(",", " ")
    assert flatten(values) == [int(word) for word in text.split()]


def test_names_of_types() -> None:
    values: list[Any] = [None, True, 1, 1.5, "a", {}, []]
    names = ["null", "a boolean", "a number", "a number", "a string", "an object", "an array"]
    assert [type_name(value) for value in values] == names


def printed(array: Array) -> Any:
    return json.loads(b"".join(print_array(array)))


@given(
    hnp.arrays(
        st.sampled_from(["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_printed_arrays_are_read_back_the_same(array: Array) -> None:
    back = np.array(printed(array), array.dtype)
    np.testing.assert_array_equal(back, array.ravel())
    if array.dtype.kind != "f":
        assert same(printed(array), array.ravel().tolist())


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
@pytest.mark.parametrize("dtype", ["i4", "f4", "?"])
def test_long_arrays_are_printed_in_pieces(size: int, dtype: str) -> None:
    array = (np.arange(size) % 120).astype(dtype)
    pieces = print_array(array)
    assert len(pieces) == (1 if size <= CHUNK else 1 + 2 * -(-size // CHUNK))
    assert printed(array) == array.tolist()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_numbers_are_printed_alike_with_and_without_tokens(dtype: str) -> None:
    array = np.array([[0.1, np.nan], [np.inf, -np.inf], [-0.0, 3]], dtype)
    assert b"".join(print_nested(array)) == b"[[0.1,NaN],[Infinity,-Infinity],[-0.0,3.0]]"
    assert b"".join(print_array(array)) == b"[0.1,NaN,Infinity,-Infinity,-0.0,3.0]"


def test_tokens_are_printed_bare() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 0.1], "f4")
    assert b"".join(print_array(array)).startswith(b"[NaN,Infinity,-Infinity,0.1")
    np.testing.assert_array_equal(np.array(printed(array), "f4"), array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::-2],
        np.broadcast_to(np.float32(1.5), (2, 3)),
        np.arange(4, dtype=">i4"),
        np.arange(4, dtype=">f8"),
        np.array([np.nan, 1], dtype=">f4"),
    ],
)
def test_other_layouts_are_printed_in_row_major_order(array: Array) -> None:
    assert same(printed(array), array.ravel().tolist())


def test_bytes_are_printed_as_text() -> None:
    array = object_array([b"a", "é".encode(), b'"\\\n', b"", b"\0"], (5,))
    assert printed(array) == ["a", "é", '"\\\n', "", "\0"]
    with pytest.raises(UnicodeDecodeError):
        print_array(object_array([b"\xff"], (1,)))


def test_an_object_of_very_many_keys_is_read_in_one_pass() -> None:
    """Searching simdjson's object for each key would take the square of their number."""
    keys = {str(at): at for at in range(200_000)}
    body = json.dumps({"inputs": [], **keys}).encode()
    assert read_body(body, "data", plain) == {"inputs": [], **keys}
