"""Requests' tensors joined to a batch's, and its outputs cut to their rows (spec 5.1)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from triglot.core.errors import Internal
from triglot.core.tensor import DATATYPES, array_over
from triglot.executors.joining import NoBatchDim, append, join, layout_of, rows_of, split

Array = NDArray[Any]


def values(datatype: str, shape: tuple[int, ...], first: int) -> Array:
    count = int(np.prod(shape))
    if datatype == "BYTES":
        array = np.empty(count, object)
        array[:] = [b"%d" % (first + at) for at in range(count)]
        return array.reshape(shape)
    return (np.arange(first, first + count) % 100).astype(DATATYPES[datatype].dtype).reshape(shape)


@given(
    st.sampled_from(sorted(DATATYPES)),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.integers(0, 3),
)
def test_what_is_joined_is_split_into_the_same(
    datatype: str, counts: list[int], tail: tuple[int, ...], padding: int
) -> None:
    members = [{"x": values(datatype, (count, *tail), 7 * at)} for at, count in enumerate(counts)]
    rows = sum(counts) + padding
    joined = join(members, rows, hosted=False)
    assert joined["x"].shape == (rows, *tail)
    assert joined["x"].dtype == members[0]["x"].dtype
    assert not joined["x"].flags.writeable
    for row in joined["x"][sum(counts) :]:
        np.testing.assert_array_equal(row, members[0]["x"][0])
    for member, part in zip(members, split(joined, counts, rows), strict=True):
        np.testing.assert_array_equal(part["x"], member["x"])
        assert np.shares_memory(part["x"], joined["x"]) or not part["x"].size


def test_every_input_is_joined_by_its_name() -> None:
    first = {"x": values("FP32", (1, 2), 0), "n": values("INT64", (1,), 5)}
    second = {"n": values("INT64", (2,), 6), "x": values("FP32", (2, 2), 2)}
    assert layout_of(first) == layout_of(second)
    joined = join([first, second], 3, hosted=False)
    assert joined["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert joined["n"].tolist() == [5, 6, 7]


def test_a_tensor_that_lies_anywhere_in_the_requests_bytes_is_joined() -> None:
    unaligned = array_over(memoryview(b"\0" + np.array([[1, 2]], "<f4").tobytes())[1:], np.dtype("<f4"), (1, 2))
    assert join([{"x": unaligned}, {"x": unaligned}], 2, hosted=False)["x"].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "BYTES"])
def test_shorter_members_are_padded_up_to_the_longest(datatype: str) -> None:
    members = [{"x": values(datatype, (2, 1), 1)}, {"x": values(datatype, (1, 3), 5)}]
    assert layout_of(members[0]) != layout_of(members[1])
    assert layout_of(members[0], any_lengths=True) == layout_of(members[1], any_lengths=True)
    joined = join(members, 4, hosted=False)["x"]
    nothing: Any = b"" if datatype == "BYTES" else 0
    first, two, five, six, seven = values(datatype, (7,), 1)[[0, 1, 4, 5, 6]]
    assert joined.tolist() == [
        [first, nothing, nothing],
        [two, nothing, nothing],
        [five, six, seven],
        [first, nothing, nothing],
    ]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"x": np.zeros((3, 2), "f4")}, True),
        ({"x": np.zeros((1, 3), "f4")}, False),
        ({"x": np.zeros((1, 2, 1), "f4")}, False),
        ({"x": np.zeros((1, 2), "f8")}, False),
        ({"x": np.zeros((1, 2), "f2")}, False),
        ({"x": np.zeros((1, 2), ml_dtypes.bfloat16)}, False),
        ({"y": np.zeros((1, 2), "f4")}, False),
        ({"x": np.zeros((1, 2), "f4"), "y": np.zeros(1)}, False),
    ],
)
def test_what_can_be_joined(other: dict[str, Array], same: bool) -> None:
    assert (layout_of({"x": np.zeros((1, 2), "f4")}) == layout_of(other)) is same


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "no input tensors"),
        ({"x": np.float32(1)}, "at least one dimension"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "equal 0th-dimension size"),
    ],
)
def test_inputs_without_a_batch_dim(inputs: dict[str, Array], text: str) -> None:
    with pytest.raises(NoBatchDim, match=text):
        rows_of(inputs)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "returned NoneType, expected a dict of outputs by name"),
        ([1, 2, 3], "returned list"),
        ({"y": 1.0}, "output 'y' without a batch dim for a batch of 3 rows"),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros((2, 3))},
            r"output 'y' with shape \[2,3\] .* expected 3 as its first",
        ),
    ],
)
def test_outputs_that_are_not_a_batch(answer: object, text: str) -> None:
    with pytest.raises(Internal, match=text):
        split(answer, [1, 2], 3)


def test_outputs_may_be_lists() -> None:
    first, second = split({"y": [[1], [2], [3]]}, [1, 2], 3)
    assert (first["y"].tolist(), second["y"].tolist()) == ([[1]], [[2], [3]])


def test_parts_of_a_request_are_put_below_each_other() -> None:
    assert append([{"y": np.array([1, 2])}, {"y": [3]}])["y"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "answers",
    [
        [{"y": np.zeros(1)}, {"z": np.zeros(1)}],
        [{"y": np.zeros(1)}, None],
        [{"y": np.zeros((1, 2))}, {"y": np.zeros((1, 3))}],
    ],
)
def test_parts_that_do_not_fit_together(answers: list[object]) -> None:
    with pytest.raises(Internal):
        append(answers)
