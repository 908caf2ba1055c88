"""Nested arrays of large JSON bodies: their shape, and numbers beside tokens; and nested arrays printed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triglot.core.tensor import Array
from triglot.protocols.json.arrays import LargeArray, parse_large
from triglot.protocols.json.dialect import DEFAULT_LIMITS
from triglot.protocols.json.text import CHUNK, print_nested

pytestmark = pytest.mark.usefixtures("json_library")


def parse(text: bytes) -> Any:
    return parse_large(text, DEFAULT_LIMITS)[0]


def test_all_arrays_are_large_but_those_of_objects() -> None:
    body = parse(b'{"a":[1],"b":{"c":[[2,3]],"d":"e"},"f":[{"g":[4]},{"g":[5]}],"h":[]}')
    assert [type(body[key]) for key in ("a", "f", "h")] == [LargeArray, list, LargeArray]
    assert body["b"]["c"].numbers("i").tolist() == [2, 3]
    assert [item["g"].numbers("d").tolist() for item in body["f"]] == [[4.0], [5.0]]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[]", (0,)),
        ("[1,2]", (2,)),
        ("[[1,2],[3,4],[5,6]]", (3, 2)),
        ("[[[]]]", (1, 1, 0)),
        ("[NaN,1]", (2,)),
    ],
)
def test_empty_lists_and_tokens_have_a_shape(text: str, shape: tuple[int, ...]) -> None:
    assert parse(f'{{"a":{text}}}'.encode())["a"].shape == shape


NESTED = st.recursive(st.integers(0, 9), lambda items: st.lists(items, max_size=3), max_leaves=20)


@given(st.lists(NESTED, min_size=1, max_size=3), st.sampled_from(["", " "]))
def test_only_regular_lists_of_numbers_are_dense(value: list[Any], blank: str) -> None:
    """numpy, which rejects other lists, is the reference."""
    array = parse(json.dumps({"a": value}, separators=("," + blank, ":" + blank)).encode())["a"]
    try:
        expected = np.array(value, np.float64)
    except ValueError:
        expected = np.empty(0)
    if expected.size:
        shape, numbers = array.dense("d")
        assert (shape, numbers.tolist()) == (expected.shape, expected.ravel().tolist())
    else:
        with pytest.raises(ValueError, match=r"list|bracket"):
            array.dense("d")


def test_tokens_in_one_array_leave_the_integers_of_another_alone() -> None:
    for token in ("NaN", "Infinity", "-Infinity"):
        body = parse(f'{{"a":[{token},1],"b":[1,-2],"c":[18446744073709551615]}}'.encode())
        np.testing.assert_array_equal(body["a"].numbers("d"), [float(token), 1])
        assert body["b"].numbers("i").tolist() == [1, -2]
        assert body["c"].numbers("u").tolist() == [2**64 - 1]
        with pytest.raises((TypeError, ValueError)):
            body["a"].numbers("i")


@given(
    st.sampled_from(["f4", "f8", "i1", "i8", "u8", "?"]).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    )
)
def test_nested_arrays_are_printed_as_they_are(array: Array) -> None:
    text = b"".join(print_nested(array))
    assert array.size == 0 or np.array(json.loads(text)).shape == array.shape
    np.testing.assert_array_equal(np.array(json.loads(text), array.dtype).reshape(array.shape), array)


@pytest.mark.parametrize(
    "shape", [(3 * CHUNK,), (2, CHUNK + 1), (CHUNK // 2 + 1, 3), (2, 3, CHUNK), (1, 2, 3, 7000)]
)
def test_large_arrays_are_printed_piece_by_piece(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    transposed: Any = array.T.copy().T
    assert max(map(len, print_nested(array))) <= 8 * CHUNK
    assert (
        json.loads(b"".join(print_nested(array)))
        == json.loads(b"".join(print_nested(transposed)))
        == array.tolist()
    )
    floats = array.astype(np.float32)
    floats[(0,) * len(shape)] = math.nan
    np.testing.assert_array_equal(np.array(json.loads(b"".join(print_nested(floats))), np.float32), floats)
