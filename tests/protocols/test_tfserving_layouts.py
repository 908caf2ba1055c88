"""Small Predict requests that are understood by their likeness to earlier ones mean what they always mean."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import PADDING, UNKNOWN_FIELDS, field, fixed32_field, group, varint_field
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES
from triglot.core.types import InputTensor
from triglot.pb.tfserving import predict_pb2
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.layouts import LAYOUT_BYTES, MAX_LAYOUTS_BYTES
from triglot.protocols.tfserving.codec import PredictDecoder, PredictRequest, decode_predict

FLOAT, INT32 = varint_field(1, pb.DT_FLOAT), varint_field(1, pb.DT_INT32)
SHAPE_1, SHAPE_2 = (field(2, field(2, varint_field(1, dim))) for dim in (1, 2))
SPEC = field(1, field(1, "m"))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def entry(name: str, *tensor: bytes) -> bytes:
    return field(2, field(1, name) + field(2, b"".join(tensor)))


def request(values: bytes = bytes(8), more: bytes = b"", spec: bytes = SPEC) -> bytes:
    return spec + entry("x", FLOAT, SHAPE_2, field(4, values)) + more


def plain_tensor(tensor: InputTensor) -> tuple[Any, ...]:
    data = tensor.data
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, DATATYPES[tensor.datatype].dtype)
    # Compared as text, for no NaN equals another.
    return tensor.name, tensor.datatype, tensor.shape, repr(array.tolist())


def outcome(decode: Any, data: bytes) -> Any:
    try:
        decoded = decode(data)
    except InvalidArgument as error:
        return error.message
    assert type(decoded) is PredictRequest
    inputs = sorted([plain_tensor(tensor) for tensor in decoded.inputs if tensor.datatype in DATATYPES])
    return decoded.spec, inputs, list(decoded.output_filter), decoded.unreadable


def assert_same(decoder: PredictDecoder, *messages: bytes) -> None:
    for data in messages:
        assert outcome(decoder, data) == outcome(decode_predict, data)


def assert_same_with_each_byte_changed(decoder: PredictDecoder, data: bytes, change: int) -> None:
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= change
        assert_same(decoder, data, bytes(changed), data)


@pytest.mark.parametrize("tag", [4, 5], ids=["content", "packed"])
def test_values_are_those_of_the_message(tag: int) -> None:
    decoder = PredictDecoder()
    decoder(SPEC + entry("x", FLOAT, SHAPE_2, field(tag, bytes(8))))
    for number in range(5):
        values = floats(number, -number)
        decoded = decoder(SPEC + entry("x", FLOAT, SHAPE_2, field(tag, values)))
        # Bytes show that it was sliced out, not parsed.
        assert (decoded.inputs[0].data, decoded.inputs[0].shape) == (values, (2,))


def test_one_request_does_not_change_the_next() -> None:
    decoder = PredictDecoder()
    first, second, third = decoder(request()), decoder(request()), decoder(request())
    assert second is not third
    assert second.inputs is not third.inputs
    assert second.inputs[0] is not third.inputs[0]
    assert second.unreadable is not third.unreadable
    first.inputs.clear()
    second.inputs.clear()
    second.unreadable["x"] = ""
    assert_same(decoder, request())


@pytest.mark.parametrize(
    "other",
    [
        request(spec=field(1, field(1, "n"))),
        request().replace(FLOAT, INT32),
        request().replace(FLOAT, varint_field(1, 99)),
        request().replace(b"\x22\x08", b"\x2a\x08"),
        request().replace(b"\x22\x08", b"\x32\x08"),
        request().replace(b"\x22\x08", b"\x22\x07"),
        request().replace(b"\x0a\x01x", b"\x0a\x01y"),
        request().replace(b"\x0a\x01x", b"\x0a\x01\xff"),
        request().replace(SHAPE_2, SHAPE_1),
        SPEC + entry("x", SHAPE_2, FLOAT, field(4, bytes(8))),
        SPEC + entry("x", field(4, bytes(8)), FLOAT, SHAPE_2),
        SPEC + field(2, field(2, FLOAT + SHAPE_2 + field(4, bytes(8))) + field(1, "x")),
        entry("x", FLOAT, SHAPE_2, field(4, bytes(8))) + SPEC,
    ],
)
def test_messages_of_one_length_that_differ(other: bytes) -> None:
    assert len(other) == len(request())
    decoder = PredictDecoder()
    ones = request(floats(1, 2))
    assert_same(decoder, request(), other, ones, other, other, ones, ones)


def value_in(*tensors: bytes) -> bytes:
    """An entry whose tensor comes in several parts."""
    return field(2, field(1, "x") + b"".join(field(2, tensor) for tensor in tensors))


NOT_IN_ONE_PIECE = {
    "values before another part": lambda raw: value_in(field(5, raw), FLOAT + SHAPE_1 + field(5, floats(9))),
    "content before another part": lambda raw: value_in(field(4, raw), FLOAT + SHAPE_1 + field(5, floats(9))),
    "a part that is all the rest": lambda raw: value_in(FLOAT + SHAPE_1, field(4, raw)),
    "a shape before another part": lambda raw: value_in(SHAPE_1, FLOAT + SHAPE_1 + field(4, raw)),
    "content and values": lambda raw: entry("x", FLOAT, SHAPE_1, field(4, raw), field(5, floats(9))),
    "values and content": lambda raw: entry("x", FLOAT, SHAPE_1, field(5, floats(9)), field(4, raw)),
    "content twice": lambda raw: entry("x", FLOAT, SHAPE_1, field(4, raw), field(4, floats(9))),
    "values twice": lambda raw: entry("x", FLOAT, SHAPE_1, field(5, raw), field(5, floats(9))),
    "surplus values": lambda raw: entry("x", FLOAT, SHAPE_1, field(5, raw + floats(9))),
    "too few values": lambda raw: entry("x", FLOAT, SHAPE_2, field(5, raw)),
    "a value by itself": lambda raw: entry("x", FLOAT, SHAPE_1, fixed32_field(5, raw)),
    "a value by itself, then more": lambda raw: entry(
        "x", FLOAT, SHAPE_1, fixed32_field(5, raw), field(5, floats(9))
    ),
    "another field": lambda raw: entry("x", FLOAT, SHAPE_1, field(9, raw)),
    "a field of another type": lambda raw: entry("x", INT32, SHAPE_1, field(5, raw)),
    "the same name twice": lambda raw: entry("x", FLOAT, SHAPE_1, field(4, raw)) * 2,
    "a name twice": lambda raw: field(
        2, field(1, "y") + field(2, FLOAT + SHAPE_1 + field(4, raw)) + field(1, "x")
    ),
    "a type twice": lambda raw: entry("x", INT32, FLOAT, SHAPE_1, field(4, raw)),
    "a shape in parts": lambda raw: entry("x", FLOAT, SHAPE_1, field(4, raw), SHAPE_1),
    "no shape": lambda raw: entry("x", FLOAT, field(4, raw)),
    "no elements": lambda raw: entry("x", FLOAT, field(2, field(2, "")), field(4, raw)),
    "bools": lambda raw: entry("x", varint_field(1, pb.DT_BOOL), field(4, raw[:1])),
    "strings": lambda raw: entry("x", varint_field(1, pb.DT_STRING), field(4, b"\3" + raw[:3])),
    "eight bits": lambda raw: entry("x", varint_field(1, pb.DT_FLOAT8_E5M2), field(4, raw[:1])),
    "no name": lambda raw: field(2, field(2, FLOAT + SHAPE_1 + field(4, raw))),
    "an unknown field": lambda raw: entry("x", FLOAT, SHAPE_1, field(4, raw), group(9, field(4, "?"))),
    "an entry with an unknown field": lambda raw: field(
        2, field(1, "x") + field(2, FLOAT + SHAPE_1 + field(4, raw)) + varint_field(3, 1)
    ),
    "an unknown entry": lambda raw: varint_field(2, 1) + entry("x", FLOAT, SHAPE_1, field(4, raw)),
}


@pytest.mark.parametrize("make", NOT_IN_ONE_PIECE.values(), ids=NOT_IN_ONE_PIECE.keys())
def test_tensors_that_are_not_in_one_piece(make: Any) -> None:
    decoder = PredictDecoder()
    messages = [SPEC + make(floats(number)) for number in (1, 2, -1, 3)]
    assert_same(decoder, *messages, *messages)
    assert_same_with_each_byte_changed(decoder, messages[0], 0x40)
    # With a tensor beside it that could be sliced out.
    assert_same(decoder, *[data + entry("z", FLOAT, SHAPE_1, field(4, data[-4:])) for data in messages * 2])


MORE = {
    "an output": field(3, "y"),
    "a spec again": field(1, field(1, "n")),
    "a signature": field(1, field(3, "s")),
    "an input": entry("y", INT32, SHAPE_1, field(4, bytes(4))),
    "a bad input": entry("y", SHAPE_1, field(4, bytes(4))),
    "the input again": entry("x", FLOAT, SHAPE_1, field(5, floats(7))),
    "an unknown group": group(99, field(2, "no")),
    "options": field(7, varint_field(6, 1)),
    "a lot": PADDING,
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_requests_with_more_in_them(more: bytes) -> None:
    decoder = PredictDecoder()
    for values in (b"12345678", b"abcdefgh"):
        assert_same(
            decoder, request(values, more), request(values), request(values, more), request(bytes(8), more)
        )


MOST = MAX_LAYOUTS_BYTES // LAYOUT_BYTES
"""Layouts that are remembered at a time are fewer."""


def test_more_lengths_than_are_remembered() -> None:
    decoder = PredictDecoder()
    messages = [request(spec=field(1, field(1, "m" * length))) for length in range(MOST)]
    assert_same(decoder, *messages, *messages[::-1])


TENSORS = st.builds(
    pb.TensorProto,
    dtype=st.sampled_from([pb.DT_FLOAT, pb.DT_DOUBLE, pb.DT_INT8, pb.DT_BOOL, pb.DT_STRING]),
    tensor_shape=st.none()
    | st.lists(st.integers(0, 2), max_size=2).map(lambda dims: {"dim": [{"size": d} for d in dims]}),
    tensor_content=st.sampled_from([b"", b""]) | st.binary(max_size=8),
    float_val=st.lists(st.floats(width=32), max_size=2),
    double_val=st.lists(st.floats(), max_size=1),
)
REQUESTS = st.builds(
    predict_pb2.PredictRequest,
    model_spec=st.sampled_from(["m", "n"]).map(lambda name: {"name": name}),
    inputs=st.dictionaries(st.sampled_from(["x", "y"]), TENSORS, max_size=2),
    output_filter=st.lists(st.sampled_from(["y", "z"]), max_size=1),
).map(lambda message: message.SerializeToString())


@given(st.lists(REQUESTS, min_size=1, max_size=4), UNKNOWN_FIELDS, st.data())
def test_any_sequence_of_likely_requests(messages: list[bytes], unknown: bytes, draw: st.DataObject) -> None:
    """Requests, requests with a byte changed, and fields among them, in any order and again."""
    variants = [*messages, *(unknown + data for data in messages), messages[0] + messages[-1]]
    for data in messages:
        changed = bytearray(data)
        changed[draw.draw(st.integers(0, len(changed) - 1))] ^= draw.draw(st.integers(1, 255))
        variants.append(bytes(changed))
    assert_same(PredictDecoder(), *variants, *draw.draw(st.permutations(variants)))


PARTS = st.lists(
    st.sampled_from([FLOAT, INT32, SHAPE_1, SHAPE_2, SHAPE_1 + FLOAT])
    | st.builds(
        field, st.sampled_from([4, 5, 6]), st.sampled_from([floats(1), floats(2), floats(1, 2), bytes(8)])
    ),
    max_size=5,
)


@given(st.lists(st.lists(PARTS, min_size=1, max_size=2), min_size=1, max_size=2), st.integers(1, 255))
def test_any_sequence_of_odd_tensors(inputs: list[list[list[bytes]]], change: int) -> None:
    data = b"".join(
        field(2, field(1, f"{at}") + b"".join(field(2, b"".join(part)) for part in tensor))
        for at, tensor in enumerate(inputs)
    )
    assert_same_with_each_byte_changed(PredictDecoder(), data, change)


def test_errors_are_not_remembered() -> None:
    decoder = PredictDecoder()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="not a valid"):
            decoder(request()[:-1])
    assert_same(decoder, request(bytes(7)), request(bytes(7)))
