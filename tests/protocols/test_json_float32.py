"""Numbers of JSON as FP32: what numpy makes of them, without its warnings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triglot.protocols.json.text import float32_array

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
