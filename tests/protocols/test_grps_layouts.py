"""Small GrpsMessages that are understood by their likeness to earlier ones mean what they always mean."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.grps_bytes import MESSAGES, comparable
from tests.protocols.wire_bytes import field, varint_field
from triglot.core.errors import InvalidArgument
from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import decode_message
from triglot.protocols.grps.mapping import bind_message
from triglot.protocols.grps.message import Message
from triglot.protocols.grps.request import Request, RequestDecoder

FLOAT32, FLOAT64 = varint_field(2, pb.DT_FLOAT32), varint_field(2, pb.DT_FLOAT64)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def tensor(*parts: bytes, name: str = "x") -> bytes:
    return field(1, field(1, name) + b"".join(parts))


def message(*tensors: bytes, model: str = "m-1") -> bytes:
    return field(2, model) + field(5, b"".join(tensors))


def decoder() -> RequestDecoder:
    return RequestDecoder(lambda data: Request(message=decode_message(data)))


def message_of(request: Request) -> Message:
    if request.layout is not None:
        return request.layout.message(request.values)
    assert request.message is not None
    return request.message


def outcome(decode: Callable[[bytes], Message], data: bytes) -> Any:
    try:
        return comparable(decode(data))
    except InvalidArgument as error:
        return error.message


def same(decode: RequestDecoder, data: bytes) -> bool:
    """Whether the message means what it means to who sees it alone."""
    return bool(outcome(lambda data: message_of(decode(data)), data) == outcome(decode_message, data))


def test_other_numbers_are_sliced_out() -> None:
    decode = decoder()
    shape = field(3, b"\2")
    first, other = (
        message(tensor(FLOAT32, shape, field(10, pair)), tensor(FLOAT64, field(11, struct.pack("<d", number))))
        for pair, number in ((floats(1, 2), 3), (floats(4, float("nan")), 5))
    )
    assert decode(first).layout is None
    for data in (other, first):
        request = decode(data)
        assert request.layout is not None
        assert request.model == "m-1"
        assert same(decode, data)
    sliced_out = message_of(decode(other)).data
    assert isinstance(sliced_out, list)
    assert not any(tensor.elements.flags.writeable for tensor in sliced_out)


def test_what_else_differs_is_parsed() -> None:
    decode = decoder()
    decode(message(tensor(FLOAT32, field(10, floats(1)))))
    for data in (
        message(tensor(FLOAT32, field(10, floats(1)), name="y")),
        message(tensor(FLOAT32, field(10, floats(1))), model="m-2"),
        message(tensor(varint_field(2, pb.DT_FLOAT16), field(10, floats(1)))),
    ):
        assert decode(data).layout is None
        assert same(decode, data)


def test_a_list_in_pieces_and_one_of_another_dtype_make_no_layout() -> None:
    for data in (
        message(tensor(FLOAT32, field(10, floats(1)), field(10, floats(2)))),
        message(tensor(FLOAT64, field(10, floats(1, 2)))),
        message(tensor(FLOAT32, field(10, floats(1)))) + field(5, tensor(FLOAT32)),
        message(tensor(FLOAT32, field(10, floats(1)))) + field(1, varint_field(1, 200)),
    ):
        decode = decoder()
        for _ in range(2):
            assert decode(data).layout is None
            assert same(decode, data)


def test_what_was_not_decoded_makes_no_layout() -> None:
    decode = RequestDecoder(lambda data: Request("m-1", error=InvalidArgument("no"), encoded=data))
    data = message(tensor(FLOAT32, field(10, floats(1))))
    decode(data)
    assert decode(data).layout is None


def bound(decode: RequestDecoder, signature: Signature, values: bytes, *, halves: bool = False) -> Any:
    """The inputs that a message is, and whether its layout knew them."""
    elements = (varint_field(2, pb.DT_FLOAT16), field(9, values)) if halves else (FLOAT32, field(10, values))
    request = decode(message(tensor(field(3, b"\2"), *elements, name="")))
    layout = request.layout
    if layout is not None and layout.signature is signature:
        return [
            (tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in layout.inputs(request.values)
        ], True
    asked = message_of(request)
    inputs = bind_message(asked, signature, "m")
    if layout is not None:
        layout.learn(signature, asked, inputs)
    return [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in inputs], False


def test_a_form_knows_the_inputs_of_the_signature_that_it_was_bound_to() -> None:
    decode = decoder()
    signature_a, other = (Signature([TensorSpec(name, "FP32", [-1])], []) for name in "ab")
    for signature, name, known in (
        (signature_a, "a", False),
        (signature_a, "a", False),
        (signature_a, "a", True),
        (signature_a, "a", True),
    ):
        values = floats(1, 2) if known else floats(3, float("inf"))
        assert bound(decode, signature, values) == ([(name, "FP32", (2,), values)], known)
    assert bound(decode, other, floats(5, 6)) == ([("b", "FP32", (2,), floats(5, 6))], False)
    assert bound(decode, other, floats(7, 8)) == ([("b", "FP32", (2,), floats(7, 8))], True)


def test_what_is_cast_is_looked_at_each_time() -> None:
    decode = decoder()
    signature = Signature([TensorSpec("a", "FP16", [-1])], [])
    for values in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)):
        halves = np.array(values, np.float16).tobytes()
        assert bound(decode, signature, floats(*values), halves=True) == ([("a", "FP16", (2,), halves)], False)


@given(data=MESSAGES, changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=3)), max_size=4))
def test_whatever_changes_in_a_message(data: bytes, changes: list[tuple[float, bytes]]) -> None:
    decode = decoder()
    assert same(decode, data)
    for start, octets in changes:
        at = int(start * len(data))
        changed = data[:at] + octets + data[at + len(octets) :]
        assert same(decode, changed)
