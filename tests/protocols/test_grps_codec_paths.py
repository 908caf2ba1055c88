"""GrpsMessages of every size: what is not copied, what is refused, and what counts as work."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.grps_bytes import LIST_OF, MESSAGES, comparable, expected
from tests.protocols.wire_bytes import (
    PADDING,
    field,
    fixed32_field,
    fixed64_field,
    group,
    number,
    packed,
    varint_field,
)
from triglot.core.errors import InvalidArgument
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import (
    SCAN_FROM_BYTES,
    TENSORS_FROM_BYTES,
    check_tensors,
    decode_answer,
    decode_message,
    decoding_size,
    encode_message,
    encoding_size,
    is_failure,
    model_of,
)
from triglot.protocols.grps.message import GrpsMap, GrpsTensor, Message, NDArray

LARGE = 100_000
FLOATS = struct.pack("<2f", 1.5, 2.5)


def tensor_field(*parts: bytes) -> bytes:
    """A GrpsMessage of one tensor."""
    return field(5, field(1, b"".join(parts)))


def tensors(data: bytes) -> list[GrpsTensor]:
    decoded = decode_message(data).data
    assert isinstance(decoded, list)
    return decoded


def refusal(data: bytes) -> str:
    """The text of the error, which must be the same wherever the message is padded."""
    with pytest.raises(InvalidArgument) as caught:
        decode_message(data)
    return caught.value.message


# --- views ---


@pytest.mark.parametrize(("dtype", "tag", "kind"), [(6, 9, "<f4"), (7, 10, "<f4"), (8, 11, "<f8")])
def test_packed_floats_are_views_of_the_request(dtype: int, tag: int, kind: str) -> None:
    values = np.arange(LARGE, dtype=kind)
    data = field(2, "m") + tensor_field(
        field(1, "x"), varint_field(2, dtype), field(3, packed([LARGE])), field(tag, values.tobytes())
    )
    (tensor,) = tensors(data)
    assert (tensor.elements == values).all()
    assert np.shares_memory(tensor.elements, np.frombuffer(data, np.uint8))
    assert not tensor.elements.flags.writeable


def test_nothing_large_is_allocated_for_packed_floats() -> None:
    data = tensor_field(varint_field(2, 7), field(10, bytes(4 << 20)))
    tracemalloc.start()
    try:
        decode_message(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_floats_are_joined_once() -> None:
    message = Message(data=[GrpsTensor("x", pb.DT_FLOAT32, (1 << 20,), np.zeros(1 << 20, "f4"))])
    tracemalloc.start()
    try:
        encoded = encode_message(message)
        assert tracemalloc.get_traced_memory()[1] < len(encoded) + 100_000
    finally:
        tracemalloc.stop()


def test_a_list_that_the_dtype_does_not_choose_is_ignored() -> None:
    data = tensor_field(field(10, FLOATS), field(11, bytes(16)), varint_field(2, 4), field(7, packed([3])))
    for request in (data, data + PADDING):
        assert tensors(request)[0].elements.tolist() == [3]


# --- split lists and members, merged as protobuf merges them ---

MERGED = {
    "two packed lists": tensor_field(varint_field(2, 7), field(10, FLOATS), field(10, FLOATS)),
    "packed, then single": tensor_field(varint_field(2, 7), field(10, FLOATS), fixed32_field(10)),
    "single, then packed": tensor_field(varint_field(2, 7), fixed32_field(10), field(10, FLOATS)),
    "single doubles": tensor_field(varint_field(2, 8), *[fixed64_field(11)] * 3),
    "single among packed": tensor_field(
        varint_field(2, 7), field(10, FLOATS), fixed32_field(10), field(10, FLOATS), field(10, b"")
    ),
    "many fields": tensor_field(varint_field(2, 7), *[fixed32_field(10, b"\0\0\0\x40")] * 500, field(10, FLOATS)),
    "packed and single integers": tensor_field(varint_field(2, 5), field(8, packed([-1])), varint_field(8, 2)),
    "dtype twice": tensor_field(varint_field(2, 7), field(10, FLOATS), varint_field(2, 8), field(11, bytes(8))),
    "shape in pieces": tensor_field(varint_field(3, 2), field(3, packed([3, 4]))),
    "integers beyond 32 bits": tensor_field(varint_field(2, 4), field(7, packed([2**32 + 1, -1]))),
    "gtensors twice": tensor_field(field(1, "a")) + tensor_field(field(1, "b")),
    "gtensors around text": tensor_field(field(1, "a")) + field(4, "t") + tensor_field(field(1, "b")),
    "text after gtensors": tensor_field(field(1, "a")) + field(4, "t"),
    "gmap twice": field(7, field(3, field(1, "a") + varint_field(2, 1))) * 2
    + field(7, field(3, field(1, "b") + varint_field(2, 2)))
    + field(7, field(3, field(1, "a") + varint_field(2, 3))),
    "gmap around ndarray": field(7, field(3, field(1, "a"))) + field(6, b"") + field(7, b""),
    "ndarray with fields": field(6, field(99, "a")),
    "status in pieces": field(1, varint_field(1, 5)) + field(4, "") + field(1, field(2, "m")),
    "model twice": field(2, "a") + field(2, "b"),
    "groups": group(99, tensor_field(field(1, "a"))) + tensor_field(field(1, "b"), group(98)) + group(7),
    "member of another wire type": tensor_field(field(1, "a")) + varint_field(4, 7) + fixed64_field(3),
}


@pytest.mark.parametrize("data", MERGED.values(), ids=MERGED.keys())
def test_merged_as_protobuf_does(data: bytes) -> None:
    wanted = comparable(expected(data))
    for request in (data, data + PADDING, PADDING + data):
        assert comparable(decode_message(request)) == wanted


# --- damage ---

DAMAGED = {
    "cut short": field(5, b"abc")[:-1],
    "unfinished tag": b"\xff",
    "field number 0": b"\x02\x00",
    "end of no group": b"\x0c",
    "group without end": b"\x0b",
    "wire type 6": b"\x0e",
    "model no text": field(2, b"\xff"),
    "text no text": field(4, b"\xff"),
    "text of half a character": field(4, "é".encode()[:1]),
    "earlier text no text": field(4, b"\xff") + field(4, "a"),
    "ndarray no message": field(6, b"\x08"),
    "gmap no message": field(7, b"\x08"),
    "key no text": field(7, field(1, field(1, b"\xff"))),
    "status no message": field(1, b"\x08"),
    "gtensors no message": field(5, b"\x08"),
    "gtensors with a bad field": field(5, b"\x02\x00"),
    "tensor no message": field(5, field(1, b"\x08")),
    "tensor longer than gtensors": field(5, b"\x0a\x05a"),
    "floats cut short": tensor_field(varint_field(2, 7), field(10, bytes(6))),
    "unused floats cut short": tensor_field(varint_field(2, 4), field(9, bytes(6))),
    "doubles cut short": tensor_field(field(11, bytes(12))),
    "unfinished integer": tensor_field(field(7, b"\x80")),
    "long integer": tensor_field(field(8, b"\x80" * 11 + b"\x00")),
    "name no text": tensor_field(field(1, b"\xff")),
    "string no text": tensor_field(field(12, b"\xff")),
    "gmap, damaged, then replaced": field(7, b"\x08") + field(4, "a"),
    "two halves of a gmap": field(7, b"\x1a") + field(7, b"\x00"),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.GrpsMessage.FromString(data)
    for request in (data, PADDING + data, memoryview(PADDING + data)):
        with pytest.raises(InvalidArgument, match="the request is not a valid"):
            decode_message(request)


@given(data=MESSAGES, start=st.floats(0, 1), octets=st.binary(max_size=3))
def test_changed_bytes_are_read_or_refused_as_protobuf_does(data: bytes, start: float, octets: bytes) -> None:
    place = int(start * len(data))
    changed = data[:place] + octets + data[place + len(octets) + 1 :]
    try:
        wanted = comparable(expected(changed))
    except DecodeError:
        for request in (changed, PADDING + changed):
            with pytest.raises(InvalidArgument):
                decode_message(request)
    else:
        assert comparable(decode_message(changed)) == wanted
        assert comparable(decode_message(PADDING + changed)) == wanted


@pytest.mark.parametrize(
    "data",
    [
        b"\x12",
        b"\x12\x05abcd",
        b"\x2a\x80",
        b"\x12\x80\x80\x80\x80\x80\x01",
        b"\x0e",
        b"\x02\x00",
        field(2, b"\xff"),
    ],
    ids=lambda data: data.hex(),
)
def test_a_damaged_message_has_no_model(data: bytes) -> None:
    for request in (data, tensor_field() + data, varint_field(99, 1) + data):
        with pytest.raises(InvalidArgument, match="the request"):
            model_of(request)


def test_model_is_found_with_any_other_fields() -> None:
    large = field(3, bytes(LARGE))
    assert model_of(large + field(2, "a-1") + large) == "a-1"
    assert model_of(group(50, field(2, "b")) + field(2, "a") + number(2000 << 3) + b"\x05") == "a"
    assert model_of(field(2, "a") + varint_field(2, 5) + field(2, "ü")) == "ü"
    assert model_of(varint_field(99, 5) + large) == model_of(b"") == ""


def test_a_status_in_pieces() -> None:
    failed = field(1, varint_field(3, 2))
    assert is_failure(failed + field(1, varint_field(1, 200)))
    assert not is_failure(failed + field(1, varint_field(3, 0)))
    assert not is_failure(varint_field(1, 2))


# --- limits ---


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["small", "large"])
def test_limits(padding: bytes) -> None:
    empty = field(1, b"")
    assert len(tensors(padding + field(5, empty * 1024))) == 1024
    assert refusal(padding + field(5, empty * 1025)) == "the request has more than 1024 tensors"
    assert refusal(padding + field(5, empty * 1024) + field(5, empty)) == "the request has more than 1024 tensors"
    shape = packed([1] * 32)
    assert tensors(padding + tensor_field(field(3, shape)))[0].shape == (1,) * 32
    for long in (field(3, shape + b"\1"), field(3, shape) + varint_field(3, 1), varint_field(3, 1) * 70):
        assert refusal(padding + tensor_field(long)) == "the request has more than 32 dims in a shape"


def test_limit_of_a_map() -> None:
    def entries(count: int, first: int = 0) -> bytes:
        return b"".join([field(1, field(1, f"{first + at}")) for at in range(count)])

    most = 16 * 1024
    decoded = decode_message(field(7, entries(most)) + field(7, entries(10))).data
    assert isinstance(decoded, GrpsMap)
    assert len(decoded.s_s) == most
    text = "the request has more than 16384 entries in a map"
    assert refusal(field(7, entries(most + 1))) == text
    # The same key each time is one entry, but each costs the same to read.
    assert refusal(field(7, field(1, b"") * (most + 1))) == text
    assert refusal(field(7, entries(most)) + field(7, entries(1, most))) == text


def test_repeats_are_counted_before_they_become_objects() -> None:
    data = field(5, field(1, b"") * 500_000)
    tracemalloc.start()
    try:
        assert "more than 1024 tensors" in refusal(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_members_that_are_replaced_count_as_well() -> None:
    data = (field(5, field(1, b"") * 1000) + field(4, "")) * 20
    assert len(data) > SCAN_FROM_BYTES
    assert "more than 1024 tensors" in refusal(data)


def test_many_fields() -> None:
    assert "more than 32768 protobuf fields" in refusal(field(6, b"") * 40_000)
    # Texts come one by one: a tensor may hold as many as there are.
    texts = tensors(tensor_field(varint_field(2, 9), field(12, "ab") * 40_000))[0].elements
    assert (len(texts), texts[-1]) == (40_000, "ab")


# --- work ---


def test_decoding_size() -> None:
    floats = tensor_field(varint_field(2, 7), field(10, bytes(4 * LARGE)))
    assert decoding_size(floats) < 100
    integers = tensor_field(varint_field(2, 5), field(8, packed(range(LARGE))))
    assert 0 <= len(integers) - decoding_size(integers) < 20
    texts = tensor_field(varint_field(2, 9), field(12, "ab") * LARGE)
    assert 0 <= len(texts) - decoding_size(texts) < 20
    entries = field(7, b"".join([field(1, field(1, f"{key}")) for key in range(10_000)]))
    assert 0 <= len(entries) - decoding_size(entries) < 20
    assert 0 < decoding_size(field(3, bytes(LARGE))) <= LARGE // 10
    assert decoding_size(floats + PADDING) > len(PADDING) - 1
    # Not looked at for long: it is for a thread to find out what it is.
    for odd in (PADDING + b"\xff", field(4, "") * LARGE, field(5, field(1, "") * LARGE), field(2, "") * LARGE):
        assert decoding_size(odd) == len(odd)


def test_a_model_may_answer_with_what_no_request_may_hold() -> None:
    for answer in (
        pb.GrpsMessage(model="m", gtensors=pb.GenericTensorData(tensors=[pb.GenericTensor(name="x")] * 5000)),
        pb.GrpsMessage(gmap=pb.GenericMapData(s_i32={str(key): key for key in range(20_000)})),
        tensor_message(shape=[1] * 40, dtype=pb.DT_FLOAT32, flat_float32=[1]),
        tensor_message(shape=[1] * 40, dtype=pb.DT_FLOAT32, flat_float32=[1] * LARGE),
        tensor_message(shape=[1] * 40, dtype=pb.DT_INT32, flat_int32=[1]),
    ):
        with pytest.raises(InvalidArgument, match="the request has more than"):
            decode_message(answer.SerializeToString())
        decoded = decode_answer(answer.SerializeToString())
        assert pb.GrpsMessage.FromString(encode_message(decoded)) == answer


def tensor_message(**fields: Any) -> pb.GrpsMessage:
    return pb.GrpsMessage(gtensors=pb.GenericTensorData(tensors=[pb.GenericTensor(**fields)]))


def test_tensors_are_counted() -> None:
    few, many = field(5, field(1, "") * 32_000), field(5, field(1, "") * 33_000)
    check_tensors(few + field(4, bytes(TENSORS_FROM_BYTES)))
    for odd in (many + field(4, bytes(TENSORS_FROM_BYTES)), few + few + field(4, bytes(TENSORS_FROM_BYTES))):
        with pytest.raises(InvalidArgument, match="the request has more than 32768 tensors"):
            check_tensors(odd)
    check_tensors(many)  # It is small.


def test_fields_are_counted() -> None:
    assert model_of(field(2, "m") + field(4, "") * 32_767) == "m"
    with pytest.raises(InvalidArgument, match="more than 32768 protobuf fields"):
        model_of(field(2, "m") + field(4, "") * 32_768)


def test_encoding_size() -> None:
    for dtype, (_, kind) in LIST_OF.items():
        array = np.zeros(LARGE, kind)
        size = encoding_size(Message(data=[GrpsTensor("x", dtype, (LARGE,), array)]))
        assert size == 0 if np.dtype(kind).kind == "f" else size >= LARGE
    assert encoding_size(Message(data=GrpsMap(s_i32={str(key): key for key in range(1000)}))) >= 1000
    assert 0 < encoding_size(Message(data=bytes(LARGE))) < LARGE
    assert encoding_size(Message(data=NDArray())) == encoding_size(Message()) == 0
    assert encoding_size(Message(data=[GrpsTensor("x", 42, (), np.empty(0))])) == 0
