"""The inputs that a version is warmed with: zeros, random ones, those of a file, and a class's examples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository.warmed_models import AnyTensors, Declared, asked, refusal, warmed
from triglot import ModelLoadError
from triglot.core.tensor import DATATYPES, numbers_of, object_array, pack_bytes, raw_buffer
from triglot.model.config import WarmUpInput, WarmUpRequest
from triglot.model.warm_up_inputs import RANDOM_BELOW

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)

# --- inputs of a configured request ---


async def seen_of(wanted: WarmUpInput, batch_size: int = 0, max_batch_size: int = 0) -> Any:
    model = AnyTensors()
    model.max_batch_size = max_batch_size
    await warmed(model, asked(batch_size, x=wanted))
    (seen,) = model.seen
    return seen["x"]


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_zeros(datatype: str) -> None:
    array = await seen_of(WarmUpInput(datatype, [2, 3]))
    assert (array.dtype, array.shape) == (DATATYPES[datatype].dtype, (2, 3))
    assert set(numbers_of(array).ravel().tolist()) == ({b""} if datatype == "BYTES" else {0})
    assert not array.flags.writeable


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_random_values_are_the_same_every_time(datatype: str) -> None:
    first, second = [await seen_of(WarmUpInput(datatype, [20, 30], random=True)) for _ in range(2)]
    assert (first.dtype, first.shape) == (DATATYPES[datatype].dtype, (20, 30))
    assert first.tolist() == second.tolist()
    first = numbers_of(first)
    values = set(first.ravel().tolist())
    if datatype == "BOOL":
        assert values == {False, True}
        return
    assert len(values) > 50
    if datatype == "BYTES":
        assert all(len(text) == 8 and text.isascii() and text.decode().isprintable() for text in values)
    else:
        numbers = first.real.astype("f8")
        assert numbers.min() >= 0
        assert numbers.max() <= (RANDOM_BELOW - 1 if first.dtype.kind in "ui" else 1)


@pytest.mark.parametrize(
    ("batch_size", "max_batch_size", "shape"), [(0, 0, [2]), (1, 0, [2]), (0, 4, [1, 2]), (3, 4, [3, 2])]
)
async def test_the_batch_dim(batch_size: int, max_batch_size: int, shape: list[int]) -> None:
    for random in (False, True):
        array = await seen_of(WarmUpInput("INT16", [2], random=random), batch_size, max_batch_size)
        assert list(array.shape) == shape


STORED = {
    "INT32": np.array([[1, -2, 3], [4, 5, 6]], "<i4"),
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    "BF16": np.array([[1.5, -2, 3], [4, 5, 6]], ml_dtypes.bfloat16),
    "BYTES": object_array([b"", b"a\0", b"\xff", b"1", b"22", b"333"], (2, 3)),
}


@pytest.mark.parametrize("datatype", STORED)
async def test_values_of_a_file(tmp_path: Path, datatype: str) -> None:
    both = STORED[datatype]
    row, all_rows = (tmp_path / name for name in ("row", "whole"))
    row.write_bytes(bytes(raw_buffer(both[0])))
    all_rows.write_bytes(bytes(raw_buffer(both)))
    unbatched = await seen_of(WarmUpInput(datatype, [2, 3], file=all_rows))
    assert (unbatched.dtype, unbatched.tolist()) == (both.dtype, both.tolist())
    repeated = await seen_of(WarmUpInput(datatype, [3], file=row), 2, 4)
    assert repeated.tolist() == [both[0].tolist()] * 2
    batch = await seen_of(WarmUpInput(datatype, [3], file=all_rows), 2, 4)
    assert batch.tolist() == both.tolist()


@pytest.mark.parametrize(
    ("data", "wanted", "batch", "text"),
    [
        (bytes(11), ("FP32", [3]), 0, "expected 12 bytes, found 11"),
        (bytes(24), ("FP32", [3]), 1, "expected 12 bytes, found 24"),
        (bytes(25), ("FP32", [3]), 2, "expected 12 bytes, or 24 for the batch of 2, found 25"),
        (b"", ("INT8", []), 0, "expected 1 bytes, found 0"),
        (bytes(8), ("BYTES", [3]), 0, "unexpected number of string elements 2 at most, expecting 3"),
        (
            pack_bytes([b"a", b"b", b"c"]),
            ("BYTES", [1]),
            2,
            "unexpected number of string elements 3 or more, expecting 2",
        ),
        (b"\x05\0\0\0ab", ("BYTES", [1]), 0, "incomplete string data, expecting 5 bytes, 2 left"),
        (None, ("FP32", [3]), 0, "No such file or directory"),
    ],
)
async def test_a_file_that_does_not_fit(
    tmp_path: Path, data: bytes | None, wanted: tuple[str, list[int]], batch: int, text: str
) -> None:
    file = tmp_path / "raw"
    if data is not None:
        file.write_bytes(data)
    model = AnyTensors()
    model.max_batch_size = 4 if batch else 0
    refused = await refusal(model, asked(batch, x=WarmUpInput(*wanted, file=file)))
    assert refused == f"model_warmup 'one': input 'x': {file}: {text}"
    assert model.seen == []


async def test_a_file_of_bools_holds_0_and_1(tmp_path: Path) -> None:
    file = tmp_path / "raw"
    file.write_bytes(b"\0\1\2")
    refused = await refusal(AnyTensors(), asked(x=WarmUpInput("BOOL", [3], file=file)))
    assert refused == "model_warmup 'one': input 'x' for model 'scripted' is BOOL: its bytes must be 0 or 1"


WIDE = 2**62


@pytest.mark.parametrize(
    ("model", "request_", "text"),
    [
        (
            Declared("FP32", [3]),
            asked(x=WarmUpInput("INT8", [3])),
            "inference input 'x' data-type is 'INT8', but ",
        ),
        (
            Declared("FP32", [3]),
            asked(z=WarmUpInput("FP32", [3])),
            "unexpected inference input 'z' for model 'scr",
        ),
        (Declared("FP32", [3]), asked(), "expected 1 inputs but got 0 inputs for model 'scripted'."),
        (
            Declared("FP32", [3]),
            asked(x=WarmUpInput("FP32", [2**40])),
            "unexpected shape for input 'x' for model ",
        ),
        (
            Declared("FP32", [-1]),
            asked(x=WarmUpInput("FP32", [WIDE])),
            "input 'x' has too many elements: shape [46",
        ),
        (Declared("FP32", [-1]), asked(x=WarmUpInput("FP32", [2**57])), "cannot create the inputs: "),
        (
            Declared("FP32", [-1]),
            asked(x=WarmUpInput("FP32", [-1])),
            "input 'x': expected dims of at least 0, got [-",
        ),
        (
            Declared("FP32", [-1]),
            asked(x=WarmUpInput("FLOAT", [1])),
            "input 'x': datatype 'FLOAT' is none of BOOL, ",
        ),
        (
            Declared("FP32", [-1]),
            asked(2, x=WarmUpInput("FP32", [1])),
            "batch_size: expected at most 1, got 2: the model's max_batch_size is 0",
        ),
        (
            Declared("FP32", [-1, 3], batch=4),
            asked(5, x=WarmUpInput("FP32", [3])),
            "batch_size: expected at most 4, got 5: the model's max_batch_size is 4",
        ),
    ],
)
async def test_a_request_that_does_not_fit(model: Declared, request_: WarmUpRequest, text: str) -> None:
    refused = await refusal(model, request_)
    assert refused.startswith(f"model_warmup 'one': {text}")
    assert model.seen == []


# --- examples ---


@pytest.mark.parametrize(
    ("datatype", "value", "array"),
    [
        ("FP32", [0.1, 2], np.array([0.1, 2], "f4")),
        ("FP32", [[1], [2]], np.array([[1], [2]], "f4")),
        ("FP32", 7, np.array(7, "f4")),
        ("FP32", [], np.array([], "f4")),
        ("FP32", [np.inf, np.nan], np.array([np.inf, np.nan], "f4")),
        ("FP32", np.array([1, 2], ">f4"), np.array([1, 2], "f4")),
        ("FP16", np.float64(65504), np.array(65504, "f2")),
        ("BF16", [1.5], np.array([1.5], ml_dtypes.bfloat16)),
        ("INT64", np.array([1, 3], ml_dtypes.bfloat16), np.array([1, 3], "i8")),
        ("UINT64", [2**64 - 1], np.array([2**64 - 1], "u8")),
        ("UINT8", [255.0, False], np.array([255, 0], "u1")),
        ("INT8", [], np.array([], "i1")),
        ("BOOL", [True, False], np.array([True, False])),
        ("BOOL", [0, 1], np.array([False, True])),
        ("COMPLEX64", [1, 2j], np.array([1, 2j], "c8")),
        ("BYTES", ["größe", b"a\0"], object_array(["größe".encode(), b"a\0"], (2,))),
        ("BYTES", "one", object_array([b"one"], ())),
        ("BYTES", np.array([["a"], ["bc"]]), object_array([b"a", b"bc"], (2, 1))),
        ("BYTES", np.array([b"\xff"]), object_array([b"\xff"], (1,))),
    ],
)
async def test_an_example_is_made_into_what_is_declared(datatype: str, value: Any, array: Any) -> None:
    model = Declared(datatype)
    await warmed(model, example={"x": value})
    seen = model.seen[0]["x"]
    assert (seen.dtype, seen.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(seen, array)
    assert not seen.flags.writeable
    if isinstance(value, np.ndarray):
        assert value.flags.writeable


@pytest.mark.parametrize(
    ("datatype", "value", "text"),
    [
        ("INT32", [1, 2.5], "expected INT32 values, got float64 from 1.0 to 2.5"),
        ("INT32", [np.nan], "expected INT32 values, got float64 from nan to nan"),
        ("INT64", [2.0**63], "expected INT64 values, got float64 from 9.223372036854776e+18 to 9.22"),
        ("UINT8", [-1, 255], "expected UINT8 values, got int64 from -1 to 255"),
        ("INT64", [2**64], "expected INT64 values, got object"),
        ("BOOL", [2], "expected BOOL values, got int64 from 2 to 2"),
        ("FP16", [1e5], "expected FP16 values, got float64 from 100000.0 to 100000.0"),
        ("FP32", [1j], "expected FP32 values, got complex128 from 1j to 1j"),
        ("COMPLEX64", [1e300j], "expected COMPLEX64 values, got complex128 from 1e+300j to 1e+300j"),
        ("FP32", ["1"], "expected FP32 values, got <U1"),
        ("FP32", [None], "expected FP32 values, got object"),
        ("FP32", [[1], [1, 2]], "cannot be converted to an array: "),
        (
            "FP32",
            np.array(["2020-01-01"], "M8[D]"),
            "cannot be converted to an array: numpy dtype datetime64[D] has no ",
        ),
        ("BYTES", [["a"], ["b", "c"]], "expected str or bytes, got list: ['a']"),
        ("BYTES", [1], "expected str or bytes, got int: 1"),
        ("BYTES", np.array([1]), "expected BYTES values, got int64"),
        ("BYTES", ["\ud800"], "cannot be converted to an array: 'utf-8' codec can't encode"),
    ],
)
async def test_an_example_of_other_values(datatype: str, value: Any, text: str) -> None:
    model = Declared(datatype)
    assert (await refusal(model, example={"x": value})).startswith(f"example: input 'x': {text}")
    assert model.seen == []


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ({"z": [1]}, "example: unexpected inference input 'z' for model 'scripted'"),
        ({}, "example: expected 1 inputs but got 0 inputs for model 'scripted'."),
        ({"x": [1, 2]}, "example: unexpected shape for input 'x' for model 'scripted'. Expected [3], got [2]."),
        ([{"x": [1, 2, 3]}, {"x": 1}], "example[1]: unexpected shape for input 'x' for model 'scripted'."),
        ([{"x": [1, 2, 3]}, [1]], "example[1]: expected a dict of inputs by name, got list"),
        ("x", "example: expected a dict of inputs by name or a list of such dicts, got str"),
        (np.zeros(3), "example: expected a dict of inputs by name or a list of such dicts, got ndarray"),
        (None, "example: expected a dict of inputs by name or a list of such dicts, got NoneType"),
    ],
)
async def test_an_example_that_does_not_fit(example: Any, text: str) -> None:
    assert (await refusal(Declared("FP32", [3]), example=example)).startswith(text)


async def test_an_example_of_a_model_that_declares_nothing() -> None:
    model = AnyTensors()
    await warmed(model, example={"a": [1.5], "b": [b"\0", "é"], "c": np.ones(2, "f4"), "d": np.array(["x"])})
    arrays = model.seen[0]
    assert [(name, array.dtype.str) for name, array in arrays.items()] == [
        ("a", "<f8"),
        ("b", "|O"),
        ("c", "<f4"),
        ("d", "|O"),
    ]
    assert [arrays[name].tolist() for name in "bd"] == [[b"\0", "é".encode()], [b"x"]]


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-200, 300) | FLOATS, min_size=1, max_size=4))
def test_whole_numbers_lose_nothing(values: list[float]) -> None:
    """An example of whole numbers arrives as it is, or is refused."""
    for datatype in ("INT8", "UINT8", "INT32", "UINT64", "INT64"):
        dtype = DATATYPES[datatype].dtype
        info = np.iinfo(dtype)
        # What numpy itself makes of the list, before any datatype is asked for, is what the user has written.
        written = np.asarray(values)
        kept = written.dtype != object and all(
            value == int(value) and info.min <= value <= info.max for value in written.tolist()
        )
        model = Declared(datatype)
        if kept:
            asyncio.run(warmed(model, example={"x": values}))
            assert model.seen[0]["x"].tolist() == written.tolist()
        else:
            with pytest.raises(ModelLoadError, match=f"example: input 'x': expected {datatype} values, got "):
                asyncio.run(warmed(model, example={"x": values}))
