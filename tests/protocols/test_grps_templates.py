"""Small GrpsMessages that are understood by their likeness to earlier ones mean what they always mean."""

from __future__ import annotations

import struct
from typing import Any

from grps_bytes import MESSAGES, comparable
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_bytes import field, varint_field

from triglot.core.errors import InvalidArgument
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import decode_message
from triglot.protocols.grps.message import Message
from triglot.protocols.grps.templates import message_decoder

FLOAT32, FLOAT64 = varint_field(2, pb.DT_FLOAT32), varint_field(2, pb.DT_FLOAT64)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def tensor(*parts: bytes, name: str = "x") -> bytes:
    return field(1, field(1, name) + b"".join(parts))


def message(*tensors: bytes, model: str = "m-1") -> bytes:
    return field(2, model) + field(5, b"".join(tensors))


def outcome(decode: Any, data: bytes) -> Any:
    try:
        return comparable(decode(data))
    except InvalidArgument as error:
        return error.message


def sliced(decoded: Message) -> bool:
    """Whether the elements are slices of the message, and not what protobuf made of it."""
    assert isinstance(decoded.data, list)
    return all(isinstance(one.elements.base, bytes) for one in decoded.data)


def test_other_numbers_are_sliced_out() -> None:
    decoder = message_decoder()
    shape = field(3, b"\2")
    first, other = (
        message(tensor(FLOAT32, shape, field(10, pair)), tensor(FLOAT64, field(11, struct.pack("<d", one))))
        for pair, one in ((floats(1, 2), 3), (floats(4, float("nan")), 5))
    )
    assert not sliced(decoder(first))
    assert sliced(decoder(other))
    for data in (first, other, first):
        assert outcome(decoder, data) == outcome(decode_message, data)
    sliced_out = decoder(other).data
    assert isinstance(sliced_out, list)
    assert not any(one.elements.flags.writeable for one in sliced_out)


def test_what_else_differs_is_parsed() -> None:
    decoder = message_decoder()
    decoder(message(tensor(FLOAT32, field(10, floats(1)))))
    for data in (
        message(tensor(FLOAT32, field(10, floats(1)), name="y")),
        message(tensor(FLOAT32, field(10, floats(1))), model="m-2"),
        message(tensor(varint_field(2, pb.DT_FLOAT16), field(10, floats(1)))),
    ):
        assert not sliced(decoder(data))
        assert outcome(decoder, data) == outcome(decode_message, data)


def test_a_list_in_pieces_and_one_of_another_dtype_make_no_template() -> None:
    for data in (
        message(tensor(FLOAT32, field(10, floats(1)), field(10, floats(2)))),
        message(tensor(FLOAT64, field(10, floats(1, 2)))),
        message(tensor(FLOAT32, field(10, floats(1)))) + field(5, tensor(FLOAT32)),
        message(tensor(FLOAT32, field(10, floats(1)))) + field(1, varint_field(1, 200)),
    ):
        decoder = message_decoder()
        for _ in range(2):
            assert not sliced(decoder(data))
            assert outcome(decoder, data) == outcome(decode_message, data)


@settings(max_examples=200)
@given(data=MESSAGES, changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=3)), max_size=4))
def test_whatever_changes_in_a_message(data: bytes, changes: list[tuple[float, bytes]]) -> None:
    decoder = message_decoder()
    assert outcome(decoder, data) == outcome(decode_message, data)
    for start, octets in changes:
        at = int(start * len(data))
        changed = data[:at] + octets + data[at + len(octets) :]
        assert outcome(decoder, changed) == outcome(decode_message, changed)
