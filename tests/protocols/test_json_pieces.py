"""Texts parsed in pieces have the values that the standard parser gives them, or are refused; and are counted."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.protocols.json.dialect import (
    CONTAINER_COST,
    MAX_DEPTH,
    STANDARD,
    VALUE_COST,
    Dialect,
    JsonLimits,
    loads_unique,
)
from triglot.protocols.json.pieces import CHUNK, MAX_WITHOUT_COMMA, Scanner, parse_in_pieces

pytestmark = pytest.mark.usefixtures("json_library")

UNLIMITED = JsonLimits(values=2**62)
TAIL = Dialect(ignores_rest=True)
FIRST = Dialect(
    loads=loads_unique,
    parse=partial(json.loads, object_pairs_hook=lambda members: dict(members) | dict(reversed(members))),
    keeps_first=True,
)
TEXTS = st.text(alphabet='ab"\\,:[]{} é\n\ud83d\ude00', max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)
CHUNKS = st.integers(1, 40)


def printed(value: Any, ascii_only: bool, blanks: bool) -> bytes:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if blanks else None)
    return text.encode(errors="surrogatepass")


@given(VALUES, st.booleans(), st.booleans(), CHUNKS)
def test_values_are_those_that_were_written(value: Any, ascii_only: bool, blanks: bool, chunk: int) -> None:
    text = printed(value, ascii_only, blanks)
    try:
        expected = json.loads(text.decode())
    except ValueError:  # A lone surrogate is no UTF-8.
        return
    assert repr(parse_in_pieces(text, UNLIMITED, chunk=chunk)) == repr(expected)


@given(VALUES, st.data(), CHUNKS)
def test_damaged_texts_are_read_as_the_standard_parser_does(value: Any, data: st.DataObject, chunk: int) -> None:
    text = bytearray(printed(value, ascii_only=True, blanks=False))
    at = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.sampled_from(b'[]{},:"\\1 '))
    if data.draw(st.booleans()):
        text.insert(at, byte)
    else:
        text[at] = byte
    try:
        expected = repr(json.loads(text))
    except ValueError:
        expected = "refused"
    found = outcome(bytes(text), chunk)
    assert ("refused" if found.startswith("refused: failed to parse the request JSON") else found) == expected


def outcome(text: bytes, chunk: int, dialect: Dialect = STANDARD) -> str:
    try:
        return repr(parse_in_pieces(text, UNLIMITED, dialect, chunk=chunk))
    except InvalidArgument as error:
        return f"refused: {error.message}"


REPEATED = [
    '{"a":[1,2],"b":3,"a":[9]}',
    '{"a":1,"a":{"b":2,"b":3},"c":4}',
    '{"a":1,"b":3,"a":[9,8]}',
    '{"a":1,"b":[],"a":[[9,8],7]}',
    '{"a":1,"b":{},"a":{"c":[9,8]}}',
    '{"a":1,"b":"q","a":{"c":[9,8]}}',
]


@pytest.mark.parametrize("dialect", [STANDARD, FIRST])
@pytest.mark.parametrize("text", REPEATED)
def test_one_of_equal_keys_counts_or_the_text_is_refused(text: str, dialect: Dialect) -> None:
    expected = repr(dialect.read(text.encode()))
    for chunk in range(1, len(text) + 1):
        found = outcome(text.encode(), chunk, dialect)
        assert found == expected or "duplicate key" in found
    assert found == expected


def test_a_dialect_ignores_the_rest() -> None:
    for chunk in (1, 5, 100):
        assert parse_in_pieces(b' {"a": [1, 2]} ]x,', UNLIMITED, TAIL, chunk=chunk) == {"a": [1, 2]}
        with pytest.raises(InvalidArgument, match="Extra data"):
            parse_in_pieces(b' {"a": [1, 2]} ]x,', UNLIMITED, chunk=chunk)


def test_numbers_that_the_quick_parser_does_not_know() -> None:
    values = [2**64, -(2**70), float("inf"), 1.5]
    for chunk in (1, 100):
        assert parse_in_pieces(json.dumps(values).encode(), UNLIMITED, chunk=chunk) == values


@given(VALUES, CHUNKS)
def test_every_value_is_counted_once(value: Any, chunk: int) -> None:
    text = printed(value, ascii_only=True, blanks=False)
    scanner = Scanner(text, UNLIMITED, chunk=chunk)
    list(scanner.commas())
    assert scanner.cost == cost(value)
    assert scanner.cost <= len(text) * CONTAINER_COST


def cost(value: Any) -> int:
    """By its commas, colons and brackets."""
    if isinstance(value, dict):
        own = max(len(value) - 1, 0) + len(value)
        return CONTAINER_COST + VALUE_COST * own + sum(map(cost, value.values()))
    if isinstance(value, list):
        return CONTAINER_COST + VALUE_COST * max(len(value) - 1, 0) + sum(map(cost, value))
    return 0


@pytest.mark.parametrize("item", [b'""', b"1", b"[]", b"{}", b'{"a":1}', b"null"])
def test_too_many_values_are_refused_where_the_count_is_passed(item: bytes) -> None:
    count = 1000
    exact = Scanner(b"[" + b",".join([item] * count) + b"]", UNLIMITED)
    list(exact.commas())
    limits = JsonLimits(values=exact.cost)
    parse_in_pieces(b"[" + b",".join([item] * count) + b"]", limits)
    # What comes behind is not even looked at.
    for text in (b"[" + b",".join([item] * (count + 1)) + b"]", b"[" + (item + b",") * 100_000):
        with pytest.raises(PayloadTooLarge, match="option max_json_values"):
            parse_in_pieces(text, limits)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_has_a_limit(opening: bytes, closing: bytes) -> None:
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(InvalidArgument, match="nested too deep"):
            parse_in_pieces(opening * depth + b"1" + closing * depth, UNLIMITED)


def test_a_text_without_commas_is_a_string_or_refused() -> None:
    long = b"1" * (2 * MAX_WITHOUT_COMMA)
    for text in (b"[" + long + b"]", b"[1,   " + long.replace(b"1", b" ") + b"2]"):
        with pytest.raises(InvalidArgument, match="bytes without a comma"):
            parse_in_pieces(text, UNLIMITED)
    assert parse_in_pieces(b'["' + long + b'", 2]', UNLIMITED) == [long.decode(), 2]


def test_a_string_is_a_quarter_of_all_at_most() -> None:
    limits = JsonLimits(size=64 * CHUNK)
    assert parse_in_pieces(b'[1, "' + b"x" * (14 * CHUNK) + b'"]', limits)
    with pytest.raises(PayloadTooLarge, match="a quarter of option max_json_size"):
        parse_in_pieces(b'[1, "' + b"x" * (20 * CHUNK) + b'"]', limits)


def test_long_strings_with_escapes_at_every_place_of_a_chunk() -> None:
    for shift in range(8):
        value = ["x" * (CHUNK - shift) + '\\"\\\\,' + "y" * CHUNK, "\\" * CHUNK, "é" * CHUNK]
        assert parse_in_pieces(json.dumps(value, ensure_ascii=False).encode(), UNLIMITED) == value
