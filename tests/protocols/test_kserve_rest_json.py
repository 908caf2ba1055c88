"""Tensors as JSON: every element exact, or refused, on the quick path and on the slow one (spec 2.1, 3.2, 3.7)."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, Array
from triglot.protocols.json.text import LARGE_FROM_BYTES
from triglot.protocols.kserve.rest import decode_infer

pytestmark = pytest.mark.usefixtures("json_library")

BLANKS = " " * LARGE_FROM_BYTES
INTEGERS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]


def elements(text: str, datatype: str, shape: list[int]) -> Array:
    body = f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":{text}}}]}}'
    data = decode_infer(HttpRequest({"model": "m"}, {}, body.encode())).request.inputs[0].data
    assert isinstance(data, np.ndarray)
    assert data.ndim == 1
    return data


def outcome(text: str, datatype: str, shape: list[int]) -> Any:
    """The elements as bytes or list, or the error's text."""
    try:
        data = elements(text, datatype, shape)
    except InvalidArgument as error:
        return f"refused: {error.message}"
    assert data.dtype == DATATYPES[datatype].dtype
    return data.tolist() if datatype == "BYTES" else data.tobytes()


def both(text: str, datatype: str, shape: list[int]) -> Any:
    """The one outcome of a small and a large body."""
    small, large = (outcome(text + size, datatype, shape) for size in ("", BLANKS))
    assert small == large
    return small


def accepted(text: str, datatype: str, count: int) -> list[Any]:
    found = both(text, datatype, [count])
    assert not isinstance(found, str), found
    values: list[Any] = found if datatype == "BYTES" else np.frombuffer(found, DATATYPES[datatype].dtype).tolist()
    return values


def refused(text: str, datatype: str, shape: list[int]) -> str:
    found = both(text, datatype, shape)
    assert isinstance(found, str), found
    return found.removeprefix("refused: ")


@pytest.mark.parametrize("datatype", INTEGERS)
def test_bounds_of_integers(datatype: str) -> None:
    bounds = np.iinfo(DATATYPES[datatype].dtype)
    least, most = int(bounds.min), int(bounds.max)
    assert accepted(f"[{least},{most},0]", datatype, 3) == [least, most, 0]
    for beyond in (least - 1, most + 1, 10**30, -(10**30)):
        assert refused(f"[0,{beyond}]", datatype, [2]) == (
            f"'data' of input 'x' has an element outside {datatype}'s range [{least}, {most}]"
        )


@pytest.mark.parametrize("datatype", INTEGERS)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1.5", "a number 1.5"),
        ("1e-2", "a number 0.01"),
        ("[2.0,4503599627370495.5]", "a number 4503599627370495.5"),
        ("true", "a boolean True"),
        ("null", "null None"),
        ('"1"', "a string '1'"),
        ("{}", "an object {}"),
        ("NaN", "a number nan"),
    ],
)
def test_what_is_no_integer(datatype: str, text: str, what: str) -> None:
    at = 2 if "," in text else 1
    assert refused(f"[7,[{text}]]", datatype, [2]) == (
        f"'data' of input 'x': element {at} must be an integer for {datatype}, got {what}"
    )


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integral_numbers_with_a_point_or_an_exponent_are_integers(datatype: str) -> None:
    text = "[1.0,-0.0,[1e2,1.2E1],12000e-3,7,0.0]"
    assert accepted(text, datatype, 7) == [1, 0, 100, 12, 12, 7, 0]
    bounds = np.iinfo(DATATYPES[datatype].dtype)
    for beyond in ("1e30", "-1e30", "18446744073709551616.0", "-9223372036854777856.0"):
        assert refused(f"[0.0,{beyond}]", datatype, [2]) == (
            f"'data' of input 'x' has an element outside {datatype}'s range [{bounds.min}, {bounds.max}]"
        )
    assert "INT64" in datatype or "outside" in refused("[9007199254740992.0]", datatype, [1])


@pytest.mark.parametrize(("datatype", "large"), [("INT64", 2**63 - 1), ("INT64", -(2**63)), ("UINT64", 2**64 - 1)])
def test_integers_next_to_a_decimal_number_stay_exact(datatype: str, large: int) -> None:
    values = [large, 2**53 + 1, 10**18, 1]
    assert accepted(f"[{large},{2**53 + 1},1e18,1.0]", datatype, 4) == values
    for beyond in (-(2**63) - 1, 2**64):
        assert "outside" in refused(f"[1.0,{beyond}]", datatype, [2])


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_floats(datatype: str) -> None:
    text = "[0.5,-0.0,1,-7,1e-3,9007199254740993,18446744073709551615,NaN,Infinity,-Infinity,null]"
    dtype = DATATYPES[datatype].dtype
    expected = np.array(
        [0.5, -0.0, 1, -7, 1e-3, 9007199254740993, 2**64 - 1, math.nan, math.inf, -math.inf, math.nan]
    ).astype(dtype)
    found = both(text, datatype, [11])
    np.testing.assert_array_equal(np.frombuffer(found, dtype), expected)
    assert math.copysign(1, np.frombuffer(found, dtype)[1]) == -1


@pytest.mark.parametrize(
    "text", ["0.1", "5e-324", "1.7976931348623157e308", "-2.2250738585072014e-308", "123456789.123"]
)
def test_doubles_are_exact(text: str) -> None:
    assert accepted(f"[{text}]", "FP64", 1) == [float(text)]


@pytest.mark.parametrize("text", ["1e39", "-1e39", "3.5e38"])
def test_numbers_beyond_fp32_become_infinite(text: str) -> None:
    assert accepted(f"[{text}]", "FP32", 1) == [math.copysign(math.inf, float(text))]


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_what_is_no_float(datatype: str) -> None:
    for text, what in (("true", "a boolean True"), ('"1"', "a string '1'"), ("{}", "an object {}")):
        assert refused(f"[1.5,{text}]", datatype, [2]) == (
            f"'data' of input 'x': element 1 must be a number for {datatype}, got {what}"
        )
    assert (
        refused(f"[1{'0' * 400}]", datatype, [1]) == f"'data' of input 'x' has an integer too large for {datatype}"
    )


def test_booleans() -> None:
    assert accepted("[true,[false]]", "BOOL", 2) == [True, False]
    for text, what in (
        ("1", "a number 1"),
        ("0.0", "a number 0.0"),
        ('"true"', "a string 'true'"),
        ("null", "null"),
    ):
        assert refused(f"[{text}]", "BOOL", [1]).startswith(
            f"'data' of input 'x': element 0 must be true or false for BOOL, got {what}"
        )


def test_strings() -> None:
    assert accepted('["ab","","é","\\u00e9","\\ud83d\\ude00","\\u0000"]', "BYTES", 6) == [
        b"ab",
        b"",
        "é".encode(),
        "é".encode(),
        "😀".encode(),
        b"\0",
    ]
    assert (
        refused("[1]", "BYTES", [1]) == "'data' of input 'x': element 0 must be a string for BYTES, got a number 1"
    )
    assert refused('["\\ud800"]', "BYTES", [1]).startswith(
        "'data' of input 'x' has a string that is not Unicode text"
    )
    long = "a" * 5000
    assert accepted(json.dumps([long]), "BYTES", 1) == [long.encode()]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", *TFSERVING_DATATYPES])
def test_datatypes_without_a_json_form(datatype: str) -> None:
    assert refused("[1.5]", datatype, [1]) == f"input 'x': {datatype} has no JSON form; send it as binary data"


@pytest.mark.parametrize("datatype", ["FP31", "fp32", "", "TYPE_FP32", "STRING"])
def test_datatypes_that_do_not_exist(datatype: str) -> None:
    assert refused("[1.5]", datatype, [1]).startswith(f"input 'x': datatype '{datatype}' is none of BOOL, UINT8, ")


@pytest.mark.parametrize(
    ("text", "shape", "count"),
    [
        ("[1,2,3,4,5,6]", [2, 3], 6),
        ("[[1,2,3],[4,5,6]]", [2, 3], 6),
        ("[[1,2,3],[4,5,6]]", [6], 6),
        ("[[[1],[2]],3,[[[4,5]]],6]", [3, 2], 6),
        ("[7]", [], 1),
        ("[]", [0], 0),
        ("[[],[[]]]", [0, 3], 0),
        ("[" * 90 + "7" + "]" * 90, [1], 1),
    ],
)
def test_nesting_is_flattened(text: str, shape: list[int], count: int) -> None:
    found = both(text, "INT32", shape)
    values = np.frombuffer(found, "i4").tolist()
    assert values == ([7] if count == 1 else list(range(1, count + 1)))


@pytest.mark.parametrize(
    ("text", "shape", "count"), [("[1,2]", [3], 2), ("[[1],[2],[3]]", [2], 3), ("[]", [1], 0), ("[1]", [0], 1)]
)
@pytest.mark.parametrize("datatype", ["INT32", "FP32", "FP64", "UINT64"])
def test_counts(text: str, shape: list[int], count: int, datatype: str) -> None:
    assert refused(text, datatype, shape) == (
        f"'data' of input 'x' has {count} elements, expected {shape[0]} for shape {shape}"
    )


def test_absurd_shapes_cost_nothing() -> None:
    assert refused("[1]", "FP32", [2**40]) == (
        f"'data' of input 'x' has 1 elements, expected {2**40} for shape [{2**40}]"
    )


@pytest.mark.parametrize("text", ["1", '"a"', "true", "{}"])
def test_data_that_is_no_array(text: str) -> None:
    assert refused(text, "FP32", []).startswith("'data' of input 'x' must be an array, got ")


NUMBERS = {
    "INT8": st.integers(-(2**7), 2**7 - 1),
    "UINT16": st.integers(0, 2**16 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32) | st.integers(-(2**70), 2**70) | st.none(),
    "FP64": st.floats() | st.integers(-(2**70), 2**70) | st.none(),
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=4),
}


@given(st.sampled_from(sorted(NUMBERS)).flatmap(lambda name: st.tuples(st.just(name), st.lists(NUMBERS[name]))))
def test_what_fits_is_taken_exactly(typed: tuple[str, list[Any]]) -> None:
    datatype, values = typed
    found = both(json.dumps(values), datatype, [len(values)])
    if datatype == "BYTES":
        assert found == [value.encode() for value in values]
        return
    dtype = DATATYPES[datatype].dtype
    numbers = [math.nan if value is None else value for value in values]
    expected = np.array(numbers, "f8").astype(dtype) if dtype.kind == "f" else np.array(numbers, dtype)
    np.testing.assert_array_equal(np.frombuffer(found, dtype), expected)


ANYTHING = st.recursive(
    st.one_of(
        st.integers(-(2**65), 2**65), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.just(1.0)
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["data", "b"]), inner, max_size=2),
    max_leaves=8,
)


@given(st.lists(ANYTHING, max_size=4), st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(0, 3), max_size=2))
def test_small_and_large_bodies_have_one_outcome(data: list[Any], datatype: str, shape: list[int]) -> None:
    both(json.dumps(data), datatype, shape)
