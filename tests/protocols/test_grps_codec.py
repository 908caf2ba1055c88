"""GrpsMessages: the bytes that clients send, what becomes of them, and the bytes of the answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.grps_bytes import LIST_OF, MESSAGES, comparable, elements_of, expected
from tests.protocols.wire_bytes import PADDING, field, varint_field
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import (
    decode_message,
    encode_message,
    failure,
    is_failure,
    model_of,
    with_success,
)
from triglot.protocols.grps.message import FAILURE, OK, GrpsMap, GrpsTensor, Message, NDArray, Status

SUCCESS_BYTES = bytes.fromhex("0a09 08c801 12024f4b 1801")


def tensor(dtype: int, elements: Any, shape: tuple[int, ...] | None = None, name: str = "x") -> GrpsTensor:
    array = np.array(elements, LIST_OF[dtype][1] if dtype in LIST_OF else "f4")
    return GrpsTensor(name, dtype, (array.size,) if shape is None else shape, array)


def tensors(data: bytes) -> list[GrpsTensor]:
    """The tensors that `data` holds."""
    decoded = decode_message(data).data
    assert isinstance(decoded, list)
    return decoded


ROUND_TRIP_MESSAGES = {
    "nothing": Message(),
    "model": Message("echo-1.0.0"),
    "text": Message("m", "héllo"),
    "empty text": Message("m", ""),
    "bytes": Message(data=b"\x00\xff"),
    "empty bytes": Message(data=b""),
    "ndarray": Message(data=NDArray()),
    "no tensors": Message(data=[]),
    "no entries": Message(data=GrpsMap()),
    "status": Message("m", "a", Status(-5, "brøken", FAILURE)),
    "success": Message("m", "a", OK),
    "empty status": Message("m", "a", Status(0, "", 0)),
    "uint8": Message(data=[tensor(1, [0, 255, 300, 2**32 - 1])]),
    "int8": Message(data=[tensor(2, [-128, 127, 300, -(2**31)])]),
    "int16": Message(data=[tensor(3, [-32768, 32767])]),
    "int32": Message(data=[tensor(4, [-(2**31), 2**31 - 1])]),
    "int64": Message(data=[tensor(5, [-(2**63), 2**63 - 1, 2**53 + 1])]),
    "half": Message(data=[tensor(6, [0.1, np.inf, np.nan, 70000])]),
    "float": Message(data=[tensor(7, [0.1, -0.0, np.nan, -np.inf])]),
    "double": Message(data=[tensor(8, [0.1, 5e-324])]),
    "string": Message(data=[tensor(9, ["中", "", "a\x00b"])]),
    "scalar": Message(data=[tensor(7, [1.5], (), "")]),
    "many dims": Message(data=[tensor(7, [1], (1,) * 32)]),
    "shape of other size": Message(data=[tensor(7, [1, 2, 3], (2, 2))]),
    "empty list": Message(data=[tensor(7, [], (0, 4))]),
    "invalid type": Message(data=[tensor(0, [], (1,))]),
    "unknown type": Message(data=[tensor(42, [], (1,))]),
    "negative type": Message(data=[tensor(-1, [], (1,))]),
    "several": Message("m", [tensor(7, [1, 2], (1, 2)), tensor(9, ["a"], name="y"), tensor(4, [-1], name="é")]),
    "map": Message(
        data=GrpsMap(
            {"k": "v", "": ""},
            {"k": b"\x00\xff"},
            {"k": -(2**31)},
            {"k": 2**63 - 1},
            {"k": 0.5, "n": float("nan")},
            {"k": 0.1},
        )
    ),
}


@pytest.mark.parametrize("message", ROUND_TRIP_MESSAGES.values(), ids=ROUND_TRIP_MESSAGES.keys())
def test_round_trip(message: Message) -> None:
    encoded = encode_message(message)
    for data in (encoded, encoded + PADDING, PADDING + encoded):
        assert comparable(decode_message(data)) == comparable(message)
        assert comparable(decode_message(memoryview(data))) == comparable(message)
    assert comparable(expected(encoded)) == comparable(message)


@pytest.mark.parametrize("message", ROUND_TRIP_MESSAGES.values(), ids=ROUND_TRIP_MESSAGES.keys())
def test_encoded_as_protobuf_does(message: Message) -> None:
    encoded = encode_message(message)
    read = pb.GrpsMessage.FromString(encoded)
    # A map's entries have no order.
    if len(read.gmap.s_s) < 2 and len(read.gmap.s_f) < 2:
        assert read.SerializeToString() == encoded


@given(data=MESSAGES)
def test_decoded_as_protobuf_does(data: bytes) -> None:
    wanted = comparable(expected(data))
    assert comparable(decode_message(data)) == wanted
    assert comparable(decode_message(data + PADDING)) == wanted
    assert comparable(decode_message(memoryview(PADDING + data))) == wanted


@given(data=MESSAGES)
def test_decoded_and_encoded_again(data: bytes) -> None:
    message = decode_message(data)
    assert comparable(expected(encode_message(message))) == comparable(message)


@given(data=MESSAGES)
def test_the_model_is_what_protobuf_reads(data: bytes) -> None:
    assert model_of(data) == expected(data).model
    assert model_of(data + PADDING) == expected(data).model


@given(data=MESSAGES)
def test_success_replaces_any_status(data: bytes) -> None:
    before, after = expected(data), expected(with_success(data))
    assert after.status == OK
    before.status = after.status = None
    assert comparable(before) == comparable(after)
    assert decode_message(with_success(data) + PADDING).status == OK


@given(data=MESSAGES)
def test_failure_is_what_protobuf_reads(data: bytes) -> None:
    status = expected(data).status
    assert is_failure(data) == (status is not None and status.status == FAILURE)


@given(code=st.integers(-(2**31), 2**31 - 1), msg=st.text())
def test_failures(code: int, msg: str) -> None:
    encoded = failure(code, msg)
    assert comparable(expected(encoded)) == comparable(Message(status=Status(code, msg, FAILURE)))
    assert is_failure(encoded)
    assert not is_failure(with_success(encoded))


def test_status_bytes() -> None:
    assert with_success(b"") == SUCCESS_BYTES
    assert encode_message(Message(status=OK)) == SUCCESS_BYTES
    assert with_success(field(4, "a")) == field(4, "a") + SUCCESS_BYTES
    # An empty text is left out.
    assert failure(500, "") == field(1, varint_field(1, 500) + varint_field(3, 2))
    assert failure(500, "a\ud800") == failure(500, "a?")


def test_unknown_fields_stay_with_the_new_status() -> None:
    assert with_success(field(99, "a") + field(4, "b")).startswith(field(99, "a") + field(4, "b"))


@pytest.mark.parametrize("dtype", LIST_OF)
@pytest.mark.parametrize("size", [5, 20_000])
def test_every_list_round_trip(dtype: int, size: int) -> None:
    name, kind = LIST_OF[dtype]
    numbers = np.arange(size) % 1000
    elements: Array = (
        np.array([str(number) for number in numbers], object) if kind == "O" else numbers.astype(kind)
    )
    encoded = encode_message(Message(data=[GrpsTensor("x", dtype, (size,), elements)]))
    read = pb.GrpsMessage.FromString(encoded).gtensors.tensors[0]
    assert [descriptor.name for descriptor, _ in read.ListFields()] == ["name", "dtype", "shape", name]
    assert read.SerializeToString() in encoded
    assert (elements_of(read) == elements).all()
    decoded = tensors(encoded)[0].elements
    assert decoded.dtype == np.dtype(kind)
    assert (decoded == elements).all()


def test_arrays_of_other_layouts_are_encoded_as_their_elements() -> None:
    wanted = np.arange(6, dtype="f4")
    for elements in (np.arange(12, dtype="f4")[::2] / 2, wanted.astype(">f4"), wanted.astype("f8")):
        encoded = encode_message(Message(data=[GrpsTensor("x", pb.DT_FLOAT32, (6,), elements)]))
        assert list(pb.GrpsMessage.FromString(encoded).gtensors.tensors[0].flat_float32) == wanted.tolist()


@pytest.mark.parametrize(
    "message",
    [
        Message("\ud800"),
        Message(data="\ud800"),
        Message(data=[tensor(9, ["\ud800"])]),
        Message(data=[tensor(7, [], name="\ud800")]),
        Message(data=GrpsMap({"k": "\ud800"})),
        Message(data=GrpsMap(s_i32={"\ud800": 1})),
    ],
    ids=["model", "text", "element", "name", "value", "key"],
)
def test_text_that_has_no_bytes(message: Message) -> None:
    with pytest.raises(InvalidArgument, match="not Unicode text"):
        encode_message(message)
