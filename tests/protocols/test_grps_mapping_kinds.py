"""Every tensor model answers grps: messages of the other kinds as inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.protocols.grps_inputs import ONE, TWO, WORD, inputs, ndarray, refusal, signature, tensor, would_change
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES
from triglot.core.types import InferenceRequest, TensorSpec
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs
from triglot.protocols.grps.mapping import tensors_of
from triglot.protocols.grps.message import Data, GrpsMap, Message, NDArray

# --- text and bytes ---


@pytest.mark.parametrize("shape", [[], [1], [-1], [-1, 1], [1, -1, -1], None], ids=str)
def test_text_and_bytes_are_one_element(shape: list[int] | None) -> None:
    wanted = signature(("word", "BYTES", shape))
    assert inputs("é", wanted)["word"].ravel().tolist() == ["é".encode()]
    array = inputs(b"\x00\xff", wanted)["word"]
    assert array.ravel().tolist() == [b"\x00\xff"]
    assert array.shape == (1,) * (1 if shape is None else len(shape))


def test_text_for_a_model_that_batches() -> None:
    wanted = Signature([TensorSpec("word", "BYTES", [-1, 1])], [], max_batch_size=4)
    assert inputs("a", wanted)["word"].tolist() == [[b"a"]]


def test_text_for_the_one_input_without_a_default() -> None:
    wanted = signature(("n", "INT32", [1]), ("word", "BYTES", [1]), defaults={"n": np.array([7], "i4")})
    arrays = inputs("a", wanted)
    assert (arrays["word"].tolist(), arrays["n"].tolist()) == ([b"a"], [7])


def test_an_input_whose_default_is_not_wanted() -> None:
    wanted = signature(("word", "BYTES", [1]), defaults={"word": np.array([b"d"], object)})
    assert inputs("a", wanted)["word"].tolist() == [b"a"]
    assert inputs(None, wanted)["word"].tolist() == [b"d"]


@pytest.mark.parametrize(
    ("data", "wanted", "text"),
    [
        ("a", ONE, "model 'm' expects 'x' (FP32 [-1]); the message has str_data"),
        (b"a", TWO, "model 'm' expects 'x' (FP32 [-1]), 'y' (INT64 [-1]); the message has bin_data"),
        (
            "a",
            signature(("a", "BYTES", [1]), ("b", "BYTES", [1])),
            "model 'm' expects 'a' (BYTES [1]), 'b' (BYTES",
        ),
        ("a", signature(), "model 'm' expects no inputs; the message has str_data"),
        (None, WORD, "model 'm' expects 'word' (BYTES [1]); the message has no data"),
        (NDArray(), ONE, "model 'm' expects 'x' (FP32 [-1]); the message has ndarray, which is always empty in a"),
        (
            "a",
            signature(("word", "BYTES", [-1, 2])),
            "input 'word' of model 'm' expects shape [-1,2], which a single value cannot fill; send gtensors",
        ),
        ("a", signature(("word", "BYTES", [0])), "input 'word' of model 'm' expects shape [0]"),
    ],
)
def test_data_that_is_no_input(data: Data, wanted: Signature, text: str) -> None:
    assert refusal(data, wanted).startswith(text)


def test_nothing_for_a_model_that_needs_nothing() -> None:
    assert inputs(None, signature()) == {}


# --- ndarray ---


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("BYTES", *TFSERVING_DATATYPES)])
def test_an_ndarray_becomes_what_is_declared(datatype: str) -> None:
    array = inputs(ndarray(0, 1, shape=(2, 1)), signature(("x", datatype, [-1, 1])))["x"]
    assert array.dtype == DATATYPES[datatype].dtype
    assert array.astype("f4").tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", 0.5),
        ("UINT8", 256),
        ("INT64", np.nan),
        ("INT32", 2.0**31),
        ("FP16", 0.1),
        ("BOOL", 2),
        ("BYTES", 1),
    ],
)
def test_an_ndarray_that_would_change(datatype: str, value: float) -> None:
    assert refusal(ndarray(value), signature(("x", datatype, [-1]))) == would_change(datatype, "ndarray")


def test_an_ndarray_is_the_only_input() -> None:
    assert refusal(ndarray(1), TWO).startswith(
        "model 'm' expects 'x' (FP32 [-1]), 'y' (INT64 [-1]); the message has"
    )
    assert "unexpected shape for input 'x'" in refusal(ndarray(1, shape=(1, 1)), ONE)
    wanted = signature(("x", "FP64", [-1]), ("n", "INT32", [1]), defaults={"n": np.array([7], "i4")})
    assert inputs(ndarray(0.5), wanted)["x"].tolist() == [0.5]


# --- gmap ---


def test_entries_of_a_map_are_inputs() -> None:
    wanted = signature(
        ("text", "BYTES", [1]),
        ("octets", "BYTES", []),
        ("i32", "INT32", [-1]),
        ("i64", "INT64", [1, -1]),
        ("f", "FP32", None),
        ("d", "FP64", [1]),
    )
    entries = GrpsMap({"text": "é"}, {"octets": b"\xff"}, {"i32": -1}, {"i64": 2**53 + 1}, {"f": 0.5}, {"d": 0.1})
    arrays = inputs(entries, wanted)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "text": ["é".encode()],
        "octets": b"\xff",
        "i32": [-1],
        "i64": [[2**53 + 1]],
        "f": [0.5],
        "d": [0.1],
    }


@pytest.mark.parametrize(
    ("entries", "datatype", "value"),
    [
        (GrpsMap(s_i32={"x": 1}), "BOOL", True),
        (GrpsMap(s_i32={"x": 7}), "FP32", 7.0),
        (GrpsMap(s_i64={"x": 2**32 - 1}), "UINT32", 2**32 - 1),
        (GrpsMap(s_i64={"x": -5}), "INT8", -5),
        (GrpsMap(s_f={"x": 0.5}), "FP64", 0.5),
        (GrpsMap(s_d={"x": 0.5}), "FP16", 0.5),
        (GrpsMap(s_d={"x": 3.0}), "INT64", 3),
    ],
)
def test_numbers_of_a_map_become_what_is_declared(entries: GrpsMap, datatype: str, value: Any) -> None:
    array = inputs(entries, signature(("x", datatype, [1])))["x"]
    assert array.dtype == DATATYPES[datatype].dtype
    assert array.tolist() == [value]


@pytest.mark.parametrize(
    ("entries", "datatype", "text"),
    [
        (
            GrpsMap(s_i32={"x": 2}),
            "BOOL",
            "input 'x' of model 'm' expects BOOL; the INT32 value cannot be converted",
        ),
        (GrpsMap(s_i64={"x": 2**53 + 1}), "FP64", "input 'x' of model 'm' expects FP64; the INT64 value cannot"),
        (
            GrpsMap(s_d={"x": 0.1}),
            "FP32",
            "input 'x' of model 'm' expects FP32; the FP64 value cannot be converted",
        ),
        (
            GrpsMap(s_s={"x": "1"}),
            "FP32",
            "input 'x' of model 'm' expects FP32; the BYTES value cannot be converted",
        ),
        (
            GrpsMap(s_f={"x": 1}),
            "BYTES",
            "input 'x' of model 'm' expects BYTES; the FP32 value cannot be converted",
        ),
        (GrpsMap(s_f={"z": 1}), "FP32", "unexpected inference input 'z' in s_f for model 'm', which has ['x']"),
        (GrpsMap(), "FP32", "expected 1 inputs but got 0 inputs for model 'm'"),
        (GrpsMap({"x": "a"}, {"x": b"a"}), "BYTES", "input 'x' already exists in request"),
    ],
)
def test_maps_that_do_not_fit(entries: GrpsMap, datatype: str, text: str) -> None:
    assert refusal(entries, signature(("x", datatype, [1]))).startswith(text)


def test_a_map_may_leave_out_what_has_a_default() -> None:
    wanted = signature(("x", "FP32", [1]), ("n", "INT32", [1]), defaults={"n": np.array([7], "i4")})
    assert inputs(GrpsMap(s_f={"x": 1}), wanted)["n"].tolist() == [7]
    assert inputs([tensor(7, [1])], wanted)["n"].tolist() == [7]
    assert inputs([tensor(7, [1], name="x")], wanted)["n"].tolist() == [7]


# --- models that take any tensors ---


def anything(data: Data) -> list[tuple[str, str, tuple[int, ...], Any]]:
    bound = bind_inputs(
        Signature((), (), any_tensors=True),
        InferenceRequest("m", inputs=(given := tensors_of(Message(data=data)))),
    )
    return [(tensor.name, tensor.datatype, tensor.shape, bound[tensor.name].tolist()) for tensor in given]


def test_tensors_for_a_model_that_takes_any() -> None:
    assert anything([tensor(1, [1, 2], (1, 2)), tensor(9, ["é"], ())]) == [
        ("input_0", "UINT8", (1, 2), [[1, 2]]),
        ("input_1", "BYTES", (), "é".encode()),
    ]
    assert anything([tensor(6, [0.5], name="a"), tensor(5, [-1], name="b")]) == [
        ("a", "FP16", (1,), [0.5]),
        ("b", "INT64", (1,), [-1]),
    ]
    assert anything("é") == [("input_0", "BYTES", (1,), ["é".encode()])]
    assert anything(b"\xff") == [("input_0", "BYTES", (1,), [b"\xff"])]
    assert anything(GrpsMap({"t": "a"}, s_i32={"i": 1}, s_d={"d": 0.5})) == [
        ("t", "BYTES", (1,), [b"a"]),
        ("i", "INT32", (1,), [1]),
        ("d", "FP64", (1,), [0.5]),
    ]
    assert anything(None) == anything(NDArray()) == anything([]) == []


def test_bad_tensors_for_a_model_that_takes_any() -> None:
    for bad in (
        [tensor(7, [1]), tensor(7, [1], name="a")],
        [tensor(2, [300])],
        [tensor(7, [1], (2,))],
        [tensor(0, [])],
    ):
        with pytest.raises(InvalidArgument):
            tensors_of(Message(data=bad))
