"""The request decoder on any bytes: small requests, which protobuf parses whole, and large ones, which are cut.

Where the two meet is no business of the client: what is put into the message in another form, in another order,
in pieces, or beside unknown fields, comes out the same on both.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import PADDING, UNKNOWN_FIELDS, damaged, field, group, packed, varint_field
from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.types import InferenceRequest
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import SCAN_FROM_BYTES, decode_infer

MIB = 2**20


def plain(request: InferenceRequest) -> tuple[Any, ...]:
    """The request as values that can be compared."""
    inputs = [
        (
            tensor.name,
            tensor.datatype,
            tensor.shape,
            (str(tensor.data.dtype), tensor.data.tolist())
            if isinstance(tensor.data, np.ndarray)
            else bytes(tensor.data),
        )
        for tensor in request.inputs
    ]
    head = (request.model_name, request.model_version, request.id, repr(request.parameters))
    return (*head, repr(inputs), list(request.outputs))


def outcome(data: bytes) -> Any:
    """The decoded request, or the error's class; anything but a `ServingError` fails the test."""
    try:
        return plain(decode_infer(data))
    except ServingError as error:
        return type(error), "" if "not a valid" in error.message else error.message


NAMES = st.text(max_size=4)
KEYS = st.sampled_from(["k", "é", "sequence_id", "priority", "timeout", "sequence_end", "triton_x", "headers"])
PARAMETERS = st.dictionaries(
    KEYS,
    st.one_of(
        st.builds(pb.InferParameter, bool_param=st.booleans()),
        st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
        st.builds(pb.InferParameter, string_param=NAMES),
        st.builds(pb.InferParameter, double_param=st.floats()),
        st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
        st.builds(pb.InferParameter),
    ),
    max_size=2,
)
CONTENTS = st.one_of(
    st.none(),
    st.builds(pb.InferTensorContents, int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)),
    st.builds(pb.InferTensorContents, fp32_contents=st.lists(st.floats(width=32), max_size=3)),
    st.builds(pb.InferTensorContents, bytes_contents=st.lists(st.binary(max_size=3), max_size=3)),
)
INPUTS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=st.sampled_from(["FP32", "INT32", "INT8", "BYTES", "FP16", "FP31", ""]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=4),
    parameters=PARAMETERS,
    contents=CONTENTS,
)
REQUESTS = st.builds(
    pb.ModelInferRequest,
    model_name=NAMES,
    model_version=NAMES,
    id=NAMES,
    parameters=PARAMETERS,
    inputs=st.lists(INPUTS, max_size=3),
    outputs=st.lists(
        st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=NAMES, parameters=PARAMETERS), max_size=2
    ),
    raw_input_contents=st.lists(st.binary(max_size=9), max_size=4),
)


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    small, large = outcome(data), outcome(PADDING + data)
    assert small == large
    outcome(data + PADDING)  # The end may run into the padding: then they differ.


@given(REQUESTS)
def test_small_and_large_requests_have_one_outcome(message: pb.ModelInferRequest) -> None:
    data = message.SerializeToString()
    assert outcome(data) == outcome(data + PADDING) == outcome(PADDING + data)


@given(REQUESTS, st.data())
def test_damaged_requests_have_one_outcome(message: pb.ModelInferRequest, draw: st.DataObject) -> None:
    data = draw.draw(damaged(message.SerializeToString(), most=3))
    small, large = outcome(data), outcome(PADDING + data)
    # What has too much of something and is damaged besides is refused for the one or the other.
    if large != small == (InvalidArgument, ""):
        small = (InvalidArgument, large[1] if "more than" in large[1] else "")
    assert small == large


def fields_of(message: pb.ModelInferRequest) -> list[bytes]:
    """The message's fields one by one, those of a kind in their order."""
    message_class = type(message)
    return [
        message_class(model_name=message.model_name).SerializeToString(),
        message_class(model_version=message.model_version).SerializeToString(),
        message_class(id=message.id).SerializeToString(),
        *(message_class(parameters={key: value}).SerializeToString() for key, value in message.parameters.items()),
        *(field(5, tensor.SerializeToString()) for tensor in message.inputs),
        *(field(6, output.SerializeToString()) for output in message.outputs),
        *(field(7, raw) for raw in message.raw_input_contents),
    ]


@given(REQUESTS, st.lists(UNKNOWN_FIELDS, max_size=4), st.randoms(use_true_random=False))
def test_order_of_fields_and_unknown_ones_do_not_matter(
    message: pb.ModelInferRequest, unknown: list[bytes], random: Any
) -> None:
    expected = outcome(message.SerializeToString())
    by_kind: dict[int, list[bytes]] = {}
    for part in fields_of(message):
        by_kind.setdefault(part[0] if part else 0, []).append(part)
    kinds = [kind for kind, parts in by_kind.items() for _ in parts]
    random.shuffle(kinds)
    parts = [by_kind[kind].pop(0) for kind in kinds]
    for extra in unknown:
        parts.insert(random.randint(0, len(parts)), extra)
    mixed = b"".join(parts)
    if len(message.parameters) < 2:  # Of two bad parameters, either may be named.
        assert outcome(mixed) == outcome(PADDING + mixed) == expected
    # As bytes, since no NaN equals another.
    padded = pb.ModelInferRequest.FromString(mixed + PADDING)
    for ours, stock in zip(padded.inputs, message.inputs, strict=True):
        assert ours.SerializeToString(deterministic=True) == stock.SerializeToString(deterministic=True)


HEAD = field(1, "x") + field(2, "INT32") + field(3, packed([2]))
TENSOR = HEAD + field(5, field(2, packed([7, 8])))
PIECES = field(5, field(2, packed([7]))) + HEAD + field(5, varint_field(2, 8))

OTHER_FORMS = {
    "the model last": field(5, TENSOR) + field(1, "m"),
    "the model twice": field(1, "other") + field(5, TENSOR) + field(1, "m"),
    "a tensor in pieces": field(1, "m") + field(5, PIECES),
    "a name twice": field(1, "m") + field(5, field(1, "other") + TENSOR),
    "a shape by its numbers": field(1, "m") + field(5, TENSOR.replace(field(3, b"\2"), varint_field(3, 2))),
    "an empty piece of a shape": field(1, "m") + field(5, field(3, "") + TENSOR),
    "groups": field(1, "m") + group(9, group(10), field(7, "no")) + field(5, TENSOR + group(5, field(5, b"\xff"))),
    "unknown fields": field(1, "m")
    + field(5, TENSOR + varint_field(5, 1) + field(1000, "?"))
    + varint_field(7, 1),
    "a length in two bytes": field(1, "m") + bytes([0x2A, len(TENSOR) | 0x80, 0]) + TENSOR,
}


@pytest.mark.parametrize("data", OTHER_FORMS.values(), ids=OTHER_FORMS.keys())
def test_other_forms_of_one_request(data: bytes) -> None:
    expected = outcome(field(1, "m") + field(5, TENSOR))
    assert not isinstance(expected[0], type)
    for request in (data, data + PADDING, PADDING + data):
        assert outcome(request) == expected


@pytest.mark.parametrize(
    "data",
    [
        bytes.fromhex("ba8080808000 00"),  # The tag of field 7 in six bytes.
        # A length in six bytes; protobuf 4 still takes it in a small message.
        pytest.param(bytes.fromhex("3a808080808000"), marks=pytest.mark.newest),
        bytes.fromhex("fa80808080808080808001 00"),  # A tag beyond 64 bits.
        bytes.fromhex("3a ffffffffffffffffff01"),  # A length of 2**64 - 1.
        bytes.fromhex("3a ffffffff0f"),  # A length of 2**32 - 1.
    ],
)
def test_numbers_that_protobuf_refuses_are_refused_in_cut_fields_too(data: bytes) -> None:
    tensor = field(5, HEAD)  # It would take the entry.
    for request in (tensor + data, tensor + data + PADDING, PADDING + tensor + data):
        assert outcome(request) == (InvalidArgument, "")


LIMITS = [
    (1024, "inputs", lambda count: field(5, "") * count),
    (1024, "requested outputs", lambda count: field(6, "") * count),
    (1024, "raw_input_contents", lambda count: field(7, "") * count),
    (256, "parameters", lambda count: b"".join(parameter(4, at) for at in range(count))),
    (16, "dims in a shape", lambda count: field(5, field(3, packed([1] * count)))),
    (16, "dims in a shape", lambda count: field(5, varint_field(3, 1) * count)),
    (16, "dims in a shape", lambda count: field(5, varint_field(3, -1) + field(3, packed([1] * (count - 1))))),
    (256, "parameters", lambda count: field(5, b"".join(parameter(4, at) for at in range(count)))),
    (256, "parameters", lambda count: field(6, b"".join(parameter(2, at) for at in range(count)))),
]


def parameter(tag: int, at: int) -> bytes:
    return field(tag, field(1, f"k{at}") + field(2, varint_field(2, at)))


@pytest.mark.parametrize(("most", "name", "fields"), LIMITS)
def test_limits(most: int, name: str, fields: Any) -> None:
    text = f"the request has more than {most} {name}"
    inside = outcome(fields(most))
    assert text not in inside
    assert outcome(fields(most) + PADDING) == inside
    assert outcome(fields(most + 1)) == (InvalidArgument, text)
    assert outcome(fields(most + 1) + PADDING) == (InvalidArgument, text)
    # Counted before anything is parsed: what comes after the one too many is not looked at.
    assert outcome(PADDING + fields(most + 1) + b"\x80") == (InvalidArgument, text)


@pytest.mark.parametrize(
    "data",
    [
        parameter(4, 1) * 256,  # One key, again and again: the last value holds.
        varint_field(7, 1) * 1025,  # Unknown, for all its number.
        field(5, field(3, b"") * 20),  # Empty pieces of a shape.
    ],
)
def test_limits_count_the_same_things_on_both_sides(data: bytes) -> None:
    assert len(data) < SCAN_FROM_BYTES
    assert outcome(data) == outcome(data + PADDING)


DECODE_AND_MEASURE = """
import re, sys
from pathlib import Path
from triglot.core.errors import InvalidArgument
from triglot.protocols.kserve.codec import decode_infer

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

data = bytes.fromhex(sys.argv[1]) * int(sys.argv[2])
before = peak()
try:
    decode_infer(data)
except InvalidArgument as error:
    print(peak() - before, error.message, sep="|")
"""


@pytest.mark.parametrize(
    ("repeated", "name"),
    [
        (field(5, ""), "inputs"),
        (field(6, ""), "requested outputs"),
        (field(7, ""), "raw_input_contents"),
        (field(4, field(1, "k")), "parameters"),
    ],
)
def test_what_is_repeated_without_end_costs_no_memory(repeated: bytes, name: str) -> None:
    count = 4 * MIB // len(repeated)
    command = [sys.executable, "-c", DECODE_AND_MEASURE, repeated.hex(), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, text = done.stdout.strip().split("|")
    assert name in text
    assert int(grown) < 2 * MIB
