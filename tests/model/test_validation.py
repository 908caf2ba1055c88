"""The one validator: each sentence of spec 1.5, and nothing allocated for a request that does not fit."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import Code
from triglot.core.tensor import DATATYPES, Buffer, element_count
from triglot.core.types import InferenceRequest, InputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.model.validation import InvalidRequest, bind_inputs, check_requested_outputs

F4 = struct.pack("<f", 1.0)
ALL = ", ".join(DATATYPES)


def tensor(name: str, datatype: str, shape: Sequence[int], data: Any = b"") -> InputTensor:
    return InputTensor(name, datatype, tuple(shape), data)


def signature(*specs: tuple[str, str, Sequence[int]], batch: int = 0) -> Signature:
    return Signature([TensorSpec(*spec) for spec in specs], [], batch)


def bind(to: Signature, *tensors: InputTensor) -> dict[str, Any]:
    return bind_inputs(to, InferenceRequest("m", inputs=list(tensors)))


MATRIX = signature(("x", "FP32", [-1, 3]))
PAIR = signature(("a", "INT32", [-1]), ("b", "INT32", [-1]))
BATCHED = signature(("a", "FP32", [-1, 3]), ("b", "INT32", [-1]), batch=4)
FREE = signature(("x", "FP32", [-1, -1, -1]))
VECTOR = signature(("x", "FP32", [-1]))
SCALAR = signature(("x", "FP32", []))
TEXT = signature(("x", "BYTES", [-1]))
TEXTS = signature(("x", "BYTES", [-1, -1]))
FLAGS = signature(("x", "BOOL", [-1]))
HALVES = signature(("x", "FP16", [-1]))

I4 = struct.pack("<i", 7)
A, B = tensor("a", "INT32", [1], I4), tensor("b", "INT32", [1], I4)
PLEASE = "Please provide all required input(s)."
SIZE = "input byte size mismatch for input 'x' for model 'm'."
SHAPE = "unexpected shape for input 'x' for model 'm'. Expected"
NOTE = "NOTE: max_batch_size is 4: the first dim is the batch."

TABLE: list[tuple[str, Signature, list[InputTensor], str]] = [
    (
        "one input missing",
        PAIR,
        [A],
        f"expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required input(s) "
        f"['b']. {PLEASE}",
    ),
    (
        "all inputs missing",
        PAIR,
        [],
        f"expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
        f"['a','b']. {PLEASE}",
    ),
    (
        "one input too many",
        PAIR,
        [A, B, tensor("c", "INT32", [1], I4)],
        "expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['a','b','c'].",
    ),
    ("an unknown input", PAIR, [A, tensor("c", "INT32", [1], I4)], "unexpected inference input 'c' for model 'm'"),
    ("an input twice", PAIR, [A, A], "input 'a' already exists in request"),
    ("an input twice beside all others", PAIR, [A, B, A], "input 'a' already exists in request"),
    (
        "another datatype",
        VECTOR,
        [tensor("x", "INT32", [1], F4)],
        "inference input 'x' data-type is 'INT32', but model 'm' expects 'FP32'",
    ),
    (
        "no datatype at all",
        VECTOR,
        [tensor("x", "FP31", [1], F4)],
        f"inference input 'x' data-type is 'FP31', which is none of {ALL}; model 'm' expects 'FP32'",
    ),
    (
        "a datatype in small letters",
        VECTOR,
        [tensor("x", "fp32", [1], F4)],
        f"inference input 'x' data-type is 'fp32', which is none of {ALL}; model 'm' expects 'FP32'",
    ),
    ("another dim", MATRIX, [tensor("x", "FP32", [1, 4], F4 * 4)], f"{SHAPE} [-1,3], got [1,4]. "),
    ("a dim too few", MATRIX, [tensor("x", "FP32", [3], F4 * 3)], f"{SHAPE} [-1,3], got [3]. "),
    ("a dim too many", MATRIX, [tensor("x", "FP32", [1, 1, 3], F4 * 3)], f"{SHAPE} [-1,3], got [1,1,3]. "),
    ("no dims", VECTOR, [tensor("x", "FP32", [], F4)], f"{SHAPE} [-1], got []. "),
    ("dims for a scalar", SCALAR, [tensor("x", "FP32", [2], F4 * 2)], f"{SHAPE} [], got [2]. "),
    ("two dims for a scalar", SCALAR, [tensor("x", "FP32", [1, 1], F4)], f"{SHAPE} [], got [1,1]. "),
    ("a negative dim", VECTOR, [tensor("x", "FP32", [-1], F4)], f"{SHAPE} [-1], got [-1]. "),
    ("two negative dims", FREE, [tensor("x", "FP32", [-2, -2, 1], F4)], f"{SHAPE} [-1,-1,-1], got [-2,-2,1]. "),
    ("the least dim", VECTOR, [tensor("x", "FP32", [-(2**63)], F4)], f"{SHAPE} [-1], got [{-(2**63)}]. "),
    (
        "another dim in a batch",
        signature(("x", "FP32", [-1, 3]), batch=4),
        [tensor("x", "FP32", [1, 4], F4 * 4)],
        f"{SHAPE} [-1,3], got [1,4]. {NOTE}",
    ),
    (
        "a batch too large",
        BATCHED,
        [tensor("a", "FP32", [5, 3], F4 * 15), tensor("b", "INT32", [5], I4 * 5)],
        "inference request batch-size must be <= 4 for 'm'",
    ),
    (
        "an empty batch",
        BATCHED,
        [tensor("a", "FP32", [0, 3]), tensor("b", "INT32", [0])],
        "inference request batch-size must be >= 1 for 'm', got 0",
    ),
    (
        "a negative batch",
        BATCHED,
        [tensor("a", "FP32", [-1, 3], F4 * 3), tensor("b", "INT32", [-1], I4)],
        "inference request batch-size must be >= 1 for 'm', got -1",
    ),
    (
        "two batch sizes",
        BATCHED,
        [tensor("a", "FP32", [2, 3], F4 * 6), tensor("b", "INT32", [3], I4 * 3)],
        "input 'b' batch size does not match other inputs for 'm'",
    ),
    (
        "no batch dim",
        BATCHED,
        [tensor("a", "FP32", [], F4), tensor("b", "INT32", [1], I4)],
        "input 'a' has no shape but model requires batch dimension for 'm'",
    ),
    ("too few bytes", VECTOR, [tensor("x", "FP32", [2], F4)], f"{SIZE} Expected 8, got 4"),
    ("too many bytes", VECTOR, [tensor("x", "FP32", [1], F4 * 2)], f"{SIZE} Expected 4, got 8"),
    ("part of an element", VECTOR, [tensor("x", "FP32", [1], F4[:3])], f"{SIZE} Expected 4, got 3"),
    ("no bytes", SCALAR, [tensor("x", "FP32", [])], f"{SIZE} Expected 4, got 0"),
    ("bytes for no elements", VECTOR, [tensor("x", "FP32", [0], F4)], f"{SIZE} Expected 0, got 4"),
    ("too few elements", VECTOR, [tensor("x", "FP32", [2], np.ones(1, "f4"))], f"{SIZE} Expected 8, got 4"),
    (
        "no elements of a raw-only type",
        HALVES,
        [tensor("x", "FP16", [1], np.ones(0, "f2"))],
        f"{SIZE} Expected 2, got 0",
    ),
    (
        "a BYTES length that is cut off",
        TEXT,
        [tensor("x", "BYTES", [2], b"\2\0\0\0aa\0\0\0")],
        "incomplete string length indicator for inference input 'x' for model 'm', 3 bytes left of 4",
    ),
    (
        "a BYTES element that is cut off",
        TEXT,
        [tensor("x", "BYTES", [1], b"\3\0\0\0aa")],
        "incomplete string data for inference input 'x' for model 'm', expecting 3 bytes, 2 left",
    ),
    (
        "too many BYTES elements",
        TEXT,
        [tensor("x", "BYTES", [1], bytes(8))],
        "unexpected number of string elements 2 or more for inference input 'x' for model 'm', expecting 1",
    ),
    (
        "too few BYTES elements",
        TEXT,
        [tensor("x", "BYTES", [2], b"\4\0\0\0" + bytes(4))],
        "unexpected number of string elements 1 for inference input 'x' for model 'm', expecting 2",
    ),
    (
        "too few BYTES elements in an array",
        TEXT,
        [tensor("x", "BYTES", [2], np.array([b"a"], dtype=object))],
        "unexpected number of string elements 1 for inference input 'x' for model 'm', expecting 2",
    ),
    (
        "a BOOL that is neither 0 nor 1",
        FLAGS,
        [tensor("x", "BOOL", [3], b"\0\1\2")],
        "input 'x' for model 'm' is BOOL: its bytes must be 0 or 1",
    ),
    (
        "more elements than can be counted",
        FREE,
        [tensor("x", "FP32", [2**62, 4, 1], F4)],
        f"input 'x' for model 'm' has too many elements: shape [{2**62},4,1]",
    ),
    (
        "a product that would wrap to nothing",
        FREE,
        [tensor("x", "FP32", [2**32, 2**32, 1])],
        f"input 'x' for model 'm' has too many elements: shape [{2**32},{2**32},1]",
    ),
    (
        "absurdly many BYTES elements",
        TEXT,
        [tensor("x", "BYTES", [2**40], bytes(4))],
        f"unexpected number of string elements 1 at most for inference input 'x' for model 'm', expecting {2**40}",
    ),
    ("absurdly many elements", VECTOR, [tensor("x", "FP32", [2**40], F4)], f"{SIZE} Expected {2**42}, got 4"),
    (
        "the most bytes that can be counted",
        VECTOR,
        [tensor("x", "FP32", [2**61 - 1], F4)],
        f"{SIZE} Expected {4 * (2**61 - 1)}, got 4",
    ),
]


@pytest.mark.parametrize(("to", "tensors", "text"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_sentence_of_each_error(to: Signature, tensors: list[InputTensor], text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            bind(to, *tensors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.message == text
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert peak < 1 << 17


@pytest.mark.parametrize("shape", [[0, 2**62, 4], [2**62, 0, 4], [0, 2**63 - 1, 2**63 - 1], [0, 2**63, 1]])
@pytest.mark.parametrize("data", [b"", np.ones(0, "f4")])
def test_no_elements_in_dims_that_no_array_can_have(shape: list[int], data: Any) -> None:
    with pytest.raises(InvalidRequest, match="input 'x' for model 'm' has too many elements"):
        bind(FREE, tensor("x", "FP32", shape, data))


@pytest.mark.parametrize("shape", [[0, 2**62], [2**63 - 1, 0]])
def test_no_strings_in_dims_that_no_array_can_have(shape: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="input 'x' for model 'm' has too many elements"):
        bind(TEXTS, tensor("x", "BYTES", shape))


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**40, 2**62, 2**63 - 1]), max_size=4),
    st.binary(max_size=16),
    st.sampled_from(["FP32", "BOOL", "BYTES", "INT8"]),
)
def test_any_tensor_binds_to_its_shape_or_is_refused(shape: list[int], data: bytes, datatype: str) -> None:
    if 0 in shape and max(shape) > 2**20:
        return  # The two tests above.
    to = signature(("x", datatype, [-1] * len(shape)))
    try:
        array = bind(to, tensor("x", datatype, shape, data))["x"]
    except InvalidRequest:
        return
    assert array.shape == tuple(shape)
    assert array.dtype == DATATYPES[datatype].dtype


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_numeric_inputs_share_memory_with_the_request(kind: type) -> None:
    data = struct.pack("<6f", *range(6))
    buffer: Buffer = kind(data)
    array = bind(MATRIX, tensor("x", "FP32", (2, 3), buffer))["x"]
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(array, np.frombuffer(data, "u1"))
    assert not array.flags.writeable


def test_elements_take_the_shape_and_become_read_only() -> None:
    array = bind(MATRIX, tensor("x", "FP32", (2, 3), np.arange(6, dtype="f4")))["x"]
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "expected"),
    [
        ("FP32", (), F4, 1.0),
        ("FP32", (0, 3), b"", []),
        ("FP32", (2, 0), b"", [[], []]),
        ("BYTES", (), b"\1\0\0\0a", b"a"),
        ("BYTES", (0,), b"", []),
        ("BYTES", (2, 1), b"\1\0\0\0a\0\0\0\0", [[b"a"], [b""]]),
        ("BOOL", (), b"\1", True),
        ("BOOL", (0,), b"", []),
        ("BOOL", (2,), b"\0\1", [False, True]),
    ],
)
def test_scalars_and_empty_inputs(datatype: str, shape: tuple[int, ...], data: bytes, expected: Any) -> None:
    array = bind(signature(("x", datatype, [-1] * len(shape))), tensor("x", datatype, shape, data))["x"]
    assert array.shape == shape
    assert array.tolist() == expected
    assert array.size == element_count(shape)


def test_inputs_come_in_any_order_and_the_batch_is_theirs() -> None:
    arrays = bind(BATCHED, tensor("b", "INT32", [4], I4 * 4), tensor("a", "FP32", [4, 3], F4 * 12))
    assert arrays["a"].shape == (4, 3)
    assert arrays["b"].tolist() == [7] * 4


OUTPUTS = Signature([], [TensorSpec("y", "FP32", [-1]), TensorSpec("z", "FP32", [-1])])


@pytest.mark.parametrize(
    ("requested", "text"),
    [
        (["y", "q"], "unexpected inference output 'q' for model 'm'"),
        ([""], "unexpected inference output '' for model 'm'"),
        (["y", "y"], "output 'y' already exists in request"),
        (["y", "z", "y"], "output 'y' already exists in request"),
    ],
)
def test_sentence_of_each_output_error(requested: list[str], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_requested_outputs(OUTPUTS, InferenceRequest("m", outputs=requested))
    assert caught.value.message == text


@pytest.mark.parametrize("requested", [[], ["y"], ["z", "y"]])
def test_outputs_that_exist_may_be_requested(requested: list[str]) -> None:
    check_requested_outputs(OUTPUTS, InferenceRequest("m", outputs=requested))
