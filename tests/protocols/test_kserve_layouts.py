"""Small requests that are understood by their likeness to earlier ones mean what they always mean."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import PADDING, UNKNOWN_FIELDS, field, varint_field
from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.types import InferenceRequest
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import InferDecoder, decode_infer
from triglot.protocols.layouts import LAYOUT_BYTES, MAX_LAYOUTS_BYTES

TENSOR = field(1, "x") + field(2, "FP32") + field(3, b"\1\2")


def request(values: bytes = bytes(8), request_id: str | bytes = "7", model: str = "m", more: bytes = b"") -> bytes:
    return field(1, model) + field(3, request_id) + field(5, TENSOR) + more + field(7, values)


def plain(decoded: InferenceRequest) -> tuple[Any, ...]:
    tensors = [
        (
            tensor.name,
            tensor.datatype,
            tensor.shape,
            repr(tensor.data.tolist()) if isinstance(tensor.data, np.ndarray) else bytes(tensor.data),
        )
        for tensor in decoded.inputs
    ]
    head = (decoded.model_name, decoded.model_version, decoded.id, repr(decoded.parameters))
    return (*head, tensors, list(decoded.outputs), repr(decoded.options), repr(decoded.input_parameters))


def outcome(decode: Any, data: bytes) -> Any:
    try:
        return plain(decode(data))
    except ServingError as error:
        return type(error), error.message


def assert_same(decoder: InferDecoder, *messages: bytes) -> None:
    for data in messages:
        assert outcome(decoder, data) == outcome(decode_infer, data)


def test_values_and_ids_are_those_of_the_message() -> None:
    decoder = InferDecoder()
    for number in range(5):
        values = struct.pack("<2f", number, -number)
        decoded = decoder(request(values, f"{number}"))
        assert decoded.id == f"{number}"
        assert decoded.inputs[0].data == values
    assert_same(decoder, request(), request(request_id=""), request(request_id="é"), request(request_id="ab"))


def test_one_request_does_not_change_the_next() -> None:
    decoder = InferDecoder()
    first, second = decoder(request()), decoder(request())
    assert first is not second
    assert first.inputs is not second.inputs
    assert first.inputs[0] is not second.inputs[0]
    assert first.parameters is not second.parameters
    first.parameters["k"] = 1
    first.inputs.clear()
    assert_same(decoder, request())


@pytest.mark.parametrize(
    "other",
    [
        request(model="n"),
        request().replace(b"FP32", b"FP64"),
        request().replace(b"\1\2", b"\2\1"),
        request().replace(b"\x3a\x08", b"\x42\x08"),
        request().replace(b"\x3a\x08", b"\x3a\x07"),
        request(request_id=b"\xff"),
        request()[:-2] + field(6, ""),
        request()[:-2] + b"\x1a\x00",
        field(3, "7") + field(1, "m") + field(5, TENSOR) + field(7, bytes(8)),
        field(7, bytes(8)) + field(1, "m") + field(3, "7") + field(5, TENSOR),
    ],
)
def test_messages_of_one_length_that_differ(other: bytes) -> None:
    assert len(other) == len(request())
    decoder = InferDecoder()
    assert_same(decoder, request(), other, request(), other, other)


def of_contents(values: list[float], datatype: str = "FP32", more: bytes = b"") -> bytes:
    message = pb.ModelInferRequest(model_name="m", id="7")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, f"{datatype.lower()}_contents").extend(values)
    return message.SerializeToString() + more


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("count", [20, 300, 9000])
def test_floats_in_contents(datatype: str, count: int) -> None:
    """They are not part of what is remembered: every request has its own."""
    decoder = InferDecoder()
    for number in range(3):
        values = [number + at / 4 for at in range(count)]
        decoded = decoder(of_contents(values, datatype))
        assert isinstance(decoded.inputs[0].data, np.ndarray)
        assert decoded.inputs[0].data.tolist() == values
    assert_same(decoder, of_contents(values, datatype), of_contents(values, datatype, field(7, "raw")))


@pytest.mark.parametrize(
    "contents",
    [
        field(6, bytes(80)) + field(99, "unknown"),
        field(6, bytes(40)) + field(6, bytes(40)),
        field(2, b"\1" * 80) + field(6, bytes(80)),
        field(7, bytes(80)),
        field(6, bytes(79)),
        varint_field(6, 1) * 40,
        field(8, bytes(80)),
        b"",
    ],
)
def test_contents_other_than_one_run_of_the_datatypes_floats(contents: bytes) -> None:
    tensor = field(1, "x" * 40) + field(2, "FP32") + field(3, b"\x14") + field(5, contents)
    decoder = InferDecoder()
    for message in (field(1, "m") + field(5, tensor), field(1, "m") + field(5, tensor + field(5, contents))):
        assert_same(decoder, message, message)


MORE = {
    "a parameter": field(4, field(1, "k") + field(2, varint_field(2, 1))),
    "an output": field(6, field(1, "y")),
    "an id again": field(3, "8"),
    "a model again": field(1, "n"),
    "a raw entry too many": field(7, "more"),
    "contents": field(5, field(1, "y") + field(2, "INT32") + field(5, field(2, b"\1"))),
    "an unknown group": b"\xfb\x06\x3a\x01a\xfc\x06",
    "an unknown field": field(99, "?"),
    "a lot": PADDING,
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_requests_with_more_in_them(more: bytes) -> None:
    decoder = InferDecoder()
    for values in (b"12345678", b"abcdefgh"):
        assert_same(decoder, request(values, more=more), request(values), request(values, "8", more=more))


def of_regions(name: str = "a", size: int = 8, request_id: str = "7", values: bytes | None = None) -> bytes:
    """Its input `x` and its output are in regions; with `values`, another input `z` is not."""
    message = pb.ModelInferRequest(model_name="m", id=request_id)
    message.inputs.add(name="x", datatype="BYTES", shape=[1])
    message.outputs.add(name="y")
    for tensor in (message.inputs[0], message.outputs[0]):
        tensor.parameters["shared_memory_region"].string_param = name
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    if values is not None:
        message.inputs.insert(0, pb.ModelInferRequest.InferInputTensor(name="z", datatype="INT8", shape=[2]))
        message.raw_input_contents.append(values)
    return message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("values", [None, b"\1\2"])
def test_what_is_in_regions_is_the_same_each_time(values: bytes | None) -> None:
    decoder = InferDecoder()
    first, second = (decoder(of_regions(values=values)) for _ in range(2))
    assert first.options is second.options is not None
    second.inputs[-1].data = b"what the region held"
    others = [of_regions("b", values=values), of_regions(size=9, values=values), of_regions("aa", 300, "", values)]
    assert_same(decoder, of_regions(values=values), *others, *others, of_regions(values=values and b"\3\4"))


def test_tensors_whose_length_says_nothing() -> None:
    decoder = InferDecoder()
    text = request().replace(b"FP32", b"BYTE").replace(b"BYTE", b"BOOL")
    assert_same(decoder, text, text, text[:-8] + b"\1" * 8)


MOST = MAX_LAYOUTS_BYTES // LAYOUT_BYTES
"""Layouts that are remembered at a time are fewer."""


def test_more_shapes_than_are_remembered() -> None:
    decoder = InferDecoder()
    messages = [request(bytes(size)) for size in range(MOST)]
    assert_same(decoder, *messages, *messages[::-1])


REGIONS = st.fixed_dictionaries(
    {},
    optional={
        "shared_memory_region": st.sampled_from(["a", "b"]).map(lambda name: pb.InferParameter(string_param=name)),
        "shared_memory_byte_size": st.integers(0, 2).map(lambda size: pb.InferParameter(int64_param=size)),
        "classification": st.integers(0, 2).map(lambda classes: pb.InferParameter(int64_param=classes)),
    },
)
NUMBERS = st.lists(st.integers(0, 9), min_size=14, max_size=20)
CONTENTS = st.builds(
    pb.InferTensorContents,
    **dict.fromkeys(("fp32_contents", "fp64_contents", "int_contents"), st.just([]) | NUMBERS),
)
TENSORS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=st.sampled_from(["x", "y"]),
    datatype=st.sampled_from(["FP32", "FP64", "INT8", "BYTES", "FP31"]),
    shape=st.lists(st.integers(-1, 3), max_size=2),
    parameters=st.just({}) | REGIONS,
    contents=st.none() | CONTENTS,
)
OUTPUTS = st.builds(
    pb.ModelInferRequest.InferRequestedOutputTensor, name=st.sampled_from(["x", "y"]), parameters=REGIONS
)
REQUESTS = st.builds(
    pb.ModelInferRequest,
    model_name=st.sampled_from(["m", "n"]),
    id=st.text(max_size=2),
    inputs=st.lists(TENSORS, max_size=2),
    outputs=st.lists(OUTPUTS, max_size=1),
    raw_input_contents=st.lists(st.binary(max_size=3), max_size=2),
).map(lambda message: message.SerializeToString())


@given(st.lists(REQUESTS, min_size=1, max_size=4), UNKNOWN_FIELDS, st.data())
def test_any_sequence_of_likely_requests(messages: list[bytes], unknown: bytes, draw: st.DataObject) -> None:
    """Requests, requests with a byte changed, and fields among them, in any order and again."""
    variants = [*messages, *(unknown + data for data in messages)]
    for data in messages:
        changed = bytearray(data)
        if changed:
            changed[draw.draw(st.integers(0, len(changed) - 1))] ^= draw.draw(st.integers(1, 255))
        variants.append(bytes(changed))
    assert_same(InferDecoder(), *variants, *draw.draw(st.permutations(variants)))


def test_errors_are_not_remembered() -> None:
    decoder = InferDecoder()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="unable to find data"):
            decoder(field(5, TENSOR))
