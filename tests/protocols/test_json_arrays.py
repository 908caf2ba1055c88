"""Long lists of numbers, parsed in pieces: what they hold, their shape, and what is not a list of numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array
from triglot.protocols.json.arrays import MAX_AT_ONCE, MAX_RANK, PIECE, LargeArray, parse_large
from triglot.protocols.json.dialect import DEFAULT_LIMITS
from triglot.protocols.json.text import float32_array, read_body

pytestmark = pytest.mark.usefixtures("json_library")

NUMBERS = np.random.default_rng(5).normal(size=PIECE // 4)


def body_of(array: Array) -> bytes:
    text = json.dumps({"first": 1, "data": array.tolist(), "last": "x"}).encode()
    assert len(text) > 4 * PIECE
    return text


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1), (2, -1), (-1, 4), (8, 1, -1, 2), (-1, 2, 2, 2)])
def test_numbers_and_shape_of_regular_lists(shape: tuple[int, ...]) -> None:
    array = NUMBERS.reshape(shape)
    values, lists = parse_large(body_of(array), DEFAULT_LIMITS)
    assert lists == [values["data"]]
    assert values["first"] == 1
    assert values["last"] == "x"
    assert values["data"].shape == array.shape
    np.testing.assert_array_equal(values["data"].numbers("d"), NUMBERS)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b"[ ", b"] ")])
def test_a_list_that_is_too_deep_is_none_of_numbers(opening: bytes, closing: bytes) -> None:
    """Its shape would have a dim for each level, and take the square of their number."""
    depth = 20_000
    blanks = b" " * MAX_AT_ONCE
    _, (array,) = parse_large(b'{"data":' + opening * depth + blanks + closing * depth + b"}", DEFAULT_LIMITS)
    with pytest.raises(ValueError, match="nested too deep"):
        _ = array.shape
    _, (array,) = parse_large(b'{"data":' + b"[" * MAX_RANK + blanks + b"]" * MAX_RANK + b"}", DEFAULT_LIMITS)
    assert len(array.shape) == MAX_RANK


@pytest.mark.parametrize(("kind", "value"), [("i", -(2**63)), ("u", 2**64 - 1)])
def test_integers_are_exact(kind: str, value: int) -> None:
    integers = [value, 2**53 + 1] * PIECE
    values, _ = parse_large(json.dumps({"data": integers}).encode(), DEFAULT_LIMITS)
    assert values["data"].numbers(kind).tolist() == integers


@pytest.mark.parametrize("token", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(-1,), (-1, 4)])
def test_tokens_are_numbers(token: float, shape: tuple[int, ...]) -> None:
    array = NUMBERS.copy()
    array[[0, 7, len(array) // 2, -1]] = token
    values, _ = parse_large(body_of(array.reshape(shape)), DEFAULT_LIMITS)
    np.testing.assert_array_equal(values["data"].numbers("d"), array)
    with pytest.raises(TypeError):
        values["data"].numbers("i")


@pytest.mark.parametrize("ending", ["],6]", "],[6]]", "]]"])
def test_long_list_with_another_item_is_not_regular(ending: str) -> None:
    numbers = json.dumps(NUMBERS.tolist() * 4)
    assert len(numbers) > MAX_AT_ONCE
    text = f'{{"data":[{numbers[:-1]}{ending}}}'.encode()
    _, (array,) = parse_large(text, DEFAULT_LIMITS)
    if ending == "]]":
        assert array.dense("d")[0] == (1, 4 * len(NUMBERS))
    else:
        with pytest.raises(ValueError, match=r"list|bracket"):
            array.dense("d")


def middle(text: bytes) -> int:
    """A place beside a comma, far from both ends of a long list."""
    return text.index(b", ", len(text) // 2)


WRONG = {
    "no number": lambda text, at: text[:at] + b"," + text[at:],
    "a bracket that opens": lambda text, at: text[: at + 2] + b"[" + text[at + 2 :],
    "a bracket that closes": lambda text, at: text[:at] + b"]" + text[at:],
    "no comma": lambda text, at: text[:at] + b" " + text[at + 1 :],
    "brackets between numbers": lambda text, at: text[:at] + b"],[" + text[at + 1 :],
    "brackets around nothing": lambda text, at: text[:at] + b",[,]" + text[at:],
    "a word": lambda text, at: text[:at] + b", nil" + text[at:],
    "an escape": lambda text, at: text[:at] + b", \\u0031" + text[at:],
}


@pytest.mark.parametrize("key", ["data", "other"])
@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_json_is_refused_by_every_reader(wrong: str, key: str) -> None:
    text = json.dumps({key: NUMBERS.tolist()}).encode()
    damaged = WRONG[wrong](text, middle(text))
    with pytest.raises(json.JSONDecodeError):
        json.loads(damaged)
    for read in (lambda _: None, lambda body: numbers_of(body[key])):
        with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
            read_body(damaged, None, read)


def test_split_never_hides_missing_values() -> None:
    """The comma at which the first piece ends has its numbers, or the text is refused."""
    for digits in range(1, 8):
        item = b"1" * digits
        text = b'{"data":[' + (item + b",") * (3 * PIECE // (digits + 1)) + item + b"]}"
        end = text.rindex(b",", 0, text.index(b"[") + PIECE)
        values, _ = parse_large(text, DEFAULT_LIMITS)
        assert len(values["data"].numbers("i")) == text.count(b",") + 1
        for damaged in (
            text[: end - digits] + b" " * digits + text[end:],
            text[: end + 1] + b"]" + text[end + 1 :],
        ):
            with pytest.raises(InvalidArgument):
                read_body(damaged, "data", lambda body: numbers_of(body["data"]))


def numbers_of(value: Any) -> Array:
    return value.numbers("d") if isinstance(value, LargeArray) else np.array(value)


@pytest.mark.parametrize("other", ["null", "true", "NaN", "[2]"])
def test_other_elements_are_for_the_plain_reader(other: str) -> None:
    text = json.dumps({"data": NUMBERS[:100].tolist() * 100}).encode()
    at = middle(text)
    mixed = text[:at] + b"," + other.encode() + text[at:]
    values = read_body(mixed, "data", plain)
    assert repr(values) == repr(json.loads(mixed))


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """A reader that takes numbers only, as arrays; else plain values."""
    for value in body.values():
        if isinstance(value, LargeArray):
            value.numbers("d")
            raise TypeError("plain values, please")
    return body


# --- numbers as FP32, without numpy's warnings ---


BEYOND_FP64 = 10**400


@given(st.lists(st.floats() | st.integers(-(2**70), 2**70)))
@example([])
@example([3.4028235677973366e38, 3.4028235677973362e38, 1e39, -1e39])
@example([2**24 + 1, 2**53 + 1, 1e-46, 1e-45, -0.0])
def test_the_numbers_are_the_nearest_ones(values: list[float]) -> None:
    with np.errstate(over="ignore"):
        expected = np.array(values, np.float64).astype(np.float32)
    array = float32_array(values)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, expected)
    assert [math.copysign(1, value) for value in array if value == 0] == [
        math.copysign(1, value) for value in expected if value == 0
    ]


def test_an_integer_that_is_no_float() -> None:
    with pytest.raises(OverflowError):
        float32_array([1.0, BEYOND_FP64])
