"""Every tensor model answers grps: outputs as messages."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from triglot.core.errors import Internal, InvalidArgument, ServingError, Unimplemented
from triglot.core.tensor import Array, datatype_of
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import decode_message, encode_message
from triglot.protocols.grps.mapping import answer_message
from triglot.protocols.grps.message import OK, Data, GrpsMap, GrpsTensor, Message


def response(**arrays: Array) -> InferenceResponse:
    outputs = [OutputTensor(name, datatype_of(array), array) for name, array in arrays.items()]
    return InferenceResponse("m", "1", "", outputs)


def answer(asked: Data, **arrays: Array) -> Data:
    """What a client that sent `asked` reads."""
    message = answer_message(response(**arrays), Message("m-1", asked))
    assert (message.model, message.status) == ("", OK)
    return decode_message(encode_message(message)).data


def words(*texts: str | bytes) -> Array:
    return np.array(texts, object)


@pytest.mark.parametrize(
    "array", [words("é"), words("é".encode()), words("é").reshape(1, 1), np.array("é")], ids=repr
)
def test_one_text_comes_back_as_it_was_sent(array: Array) -> None:
    assert answer("a", y=array) == "é"
    assert answer(b"a", y=array) == "é".encode()


def test_bytes_that_are_no_text_come_back_as_bytes() -> None:
    assert answer("a", y=words(b"\xff")) == b"\xff"


@pytest.mark.parametrize("asked", ["a", b"a"])
@pytest.mark.parametrize(
    "arrays",
    [{"y": words("a", "b")}, {"y": words("a"), "z": words("b")}, {"y": np.array([1.5], "f4")}, {}],
    ids=str,
)
def test_other_outputs_are_tensors(asked: Data, arrays: dict[str, Array]) -> None:
    tensors = answer(asked, **arrays)
    assert isinstance(tensors, list)
    assert {tensor.name: tensor.elements.tolist() for tensor in tensors} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.parametrize("asked", [None, [], GrpsMap()], ids=repr)
def test_tensors_are_answered_with_tensors(asked: Data) -> None:
    (tensor,) = tensors_in(answer(asked, y=words("é")))
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.elements.tolist()) == ("y", pb.DT_STRING, (1,), ["é"])


def tensors_in(data: Data) -> list[GrpsTensor]:
    assert isinstance(data, list)
    return data


@pytest.mark.parametrize(
    ("array", "dtype", "elements"),
    [
        (np.array([0, 255], "u1"), pb.DT_UINT8, [0, 255]),
        (np.array([-128], "i1"), pb.DT_INT8, [-128]),
        (np.array([-32768], "i2"), pb.DT_INT16, [-32768]),
        (np.array([-(2**31)], "i4"), pb.DT_INT32, [-(2**31)]),
        (np.array([2**63 - 1], "i8"), pb.DT_INT64, [2**63 - 1]),
        (np.array([0.1], "f2"), pb.DT_FLOAT16, [0.0999755859375]),
        (np.array([0.5], "f4"), pb.DT_FLOAT32, [0.5]),
        (np.array([0.1], "f8"), pb.DT_FLOAT64, [0.1]),
        (np.array(["a", "é"]), pb.DT_STRING, ["a", "é"]),
        (np.array([True, False]), pb.DT_UINT8, [1, 0]),
        (np.array([65535], "u2"), pb.DT_INT32, [65535]),
        (np.array([2**32 - 1], "u4"), pb.DT_INT64, [2**32 - 1]),
        (np.array([2**63 - 1], "u8"), pb.DT_INT64, [2**63 - 1]),
        (np.array([], "u8"), pb.DT_INT64, []),
        (np.array([1.5, np.inf], ml_dtypes.bfloat16), pb.DT_FLOAT32, [1.5, np.inf]),
        (np.array([1, 2], ">i2"), pb.DT_INT16, [1, 2]),
        (np.array([[1, 2], [3, 4]], "f4").T, pb.DT_FLOAT32, [1, 3, 2, 4]),
        (np.array(7, "i8"), pb.DT_INT64, [7]),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else "",
)
def test_every_datatype(array: Array, dtype: int, elements: list[Any]) -> None:
    message = answer_message(response(y=array), Message())
    (tensor,) = tensors_in(decode_message(encode_message(message)).data)
    assert (tensor.dtype, tensor.shape, tensor.elements.tolist()) == (dtype, array.shape, elements)


@pytest.mark.parametrize(
    ("array", "kind", "text"),
    [
        (
            np.array([1, 2**63], "u8"),
            Internal,
            "output 'y' is UINT64 and holds 9223372036854775808: grps' widest",
        ),
        (np.array([1j], "c8"), Unimplemented, "output 'y' is COMPLEX64, for which grps has no DataType"),
        (
            words(b"\xff", b"a"),
            InvalidArgument,
            "output 'y' is not UTF-8 text, which grps tensors require",
        ),
        (words("\ud800"), InvalidArgument, "output 'y' is not UTF-8 text"),
    ],
    ids=["uint64", "complex", "bytes", "half a character"],
)
def test_outputs_that_grps_cannot_carry(array: Array, kind: type[ServingError], text: str) -> None:
    with pytest.raises(kind) as caught:
        answer_message(response(y=array), Message(data=[]))
    assert caught.value.message.startswith(text)


def test_floats_of_an_output_are_not_copied_before_they_are_joined() -> None:
    array = np.arange(1000, dtype="f4")
    (tensor,) = tensors_in(answer_message(response(y=array), Message()).data)
    assert np.shares_memory(tensor.elements, array)
