"""Predict messages: the bytes that clients send, on both paths, and those that they get (tfs 2.1, 3.1)."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.protocols.odd_tensors import odd_tensor
from tests.protocols.wire_bytes import PADDING, UNKNOWN_FIELDS, damaged, field, group, varint_field
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, object_array
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor
from triglot.pb.tfserving import predict_pb2, tensor_pb2
from triglot.protocols.tfserving.codec import (
    SCAN_FROM_BYTES,
    ModelSpec,
    PredictRequest,
    decode_predict,
    encode_predict,
    encoding_size,
)
from triglot.protocols.tfserving.tensor import FEW_FIELDS

MIB = 2**20
FLOAT, SHAPE_2 = varint_field(1, 1), field(2, field(2, varint_field(1, 2)))
VALUES = field(5, struct.pack("<2f", 1, 2))
TENSOR = FLOAT + SHAPE_2 + VALUES
SPEC = field(1, field(1, "m"))


def entry(name: str, tensor: bytes | str) -> bytes:
    """One of the inputs."""
    return field(2, field(1, name) + field(2, tensor))


def plain_tensor(tensor: InputTensor) -> tuple[Any, ...]:
    data = tensor.data
    if tensor.datatype in DATATYPES and not isinstance(data, np.ndarray):
        data = np.frombuffer(data, DATATYPES[tensor.datatype].dtype)
    return (
        tensor.name,
        tensor.datatype,
        tensor.shape,
        repr(data.tolist() if isinstance(data, np.ndarray) else data),
    )


def plain(request: PredictRequest) -> tuple[Any, ...]:
    """The request as values that can be compared; a map has no order."""
    inputs = sorted([plain_tensor(tensor) for tensor in request.inputs])
    return request.spec, inputs, list(request.output_filter), sorted(request.unreadable)


def outcome(data: bytes) -> Any:
    """The decoded request, or that there is none; anything but an `InvalidArgument` fails the test."""
    try:
        return plain(decode_predict(data))
    except InvalidArgument as error:
        return "" if "not a valid" in error.message else error.message


def decoded(data: bytes) -> PredictRequest:
    """The request, which is the same on the large path."""
    expected = outcome(data)
    assert outcome(data + PADDING) == outcome(PADDING + data) == expected
    return decode_predict(data)


def refusal(data: bytes) -> str:
    expected = outcome(data)
    assert isinstance(expected, str)
    assert outcome(data + PADDING) == outcome(PADDING + data) == expected
    return expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (b"", None),
        (field(1, ""), ModelSpec("")),
        (field(1, field(1, "m")), ModelSpec("m")),
        (field(1, field(1, "é") + field(3, "s")), ModelSpec("é", None, None, "s")),
        (field(1, field(1, "m") + field(2, varint_field(1, 7))), ModelSpec("m", 7)),
        (field(1, field(1, "m") + field(2, "")), ModelSpec("m", 0)),
        (field(1, field(1, "m") + field(2, varint_field(1, -1))), ModelSpec("m", -1)),
        (field(1, field(1, "m") + field(4, "stable")), ModelSpec("m", None, "stable")),
        # Of a version and a label, the last one said holds.
        (field(1, field(4, "stable") + field(2, varint_field(1, 7))), ModelSpec("", 7)),
        (field(1, field(2, varint_field(1, 7)) + field(4, "stable")), ModelSpec("", None, "stable")),
        (field(1, field(1, "m")) + field(1, field(3, "s")), ModelSpec("m", None, None, "s")),
        (field(1, field(1, "n")) + field(1, field(1, "m")), ModelSpec("m")),
    ],
)
def test_model_specs(spec: bytes, expected: ModelSpec | None) -> None:
    for data in (spec, spec + entry("x", TENSOR), entry("x", TENSOR) + spec):
        assert decoded(data).spec == expected


def test_a_request() -> None:
    request = decoded(
        SPEC + entry("x", TENSOR) + entry("é", TENSOR) + field(3, "y") + field(3, "y") + field(3, "")
    )
    assert sorted(tensor.name for tensor in request.inputs) == ["x", "é"]
    assert list(request.output_filter) == ["y", "y", ""]
    assert request.unreadable == {}
    empty = decoded(b"")
    assert (empty.spec, empty.inputs, list(empty.output_filter), empty.unreadable) == (None, [], [], {})


def test_what_is_for_language_models_is_ignored() -> None:
    message = predict_pb2.PredictRequest.FromString(SPEC + entry("x", TENSOR))
    message.predict_streamed_options.split_dimensions["x"] = 1
    message.client_id = b"c"
    message.request_options.return_stoptokens.extend([1, 2])
    message.request_options.handshake.estimated_payload_bytes = 1
    assert plain(decoded(message.SerializeToString())) == outcome(SPEC + entry("x", TENSOR))


FORMS = {
    "value first": field(2, field(2, TENSOR) + field(1, "x")),
    "a name twice": field(2, field(1, "other") + field(2, TENSOR) + field(1, "x")),
    "a tensor in pieces": field(2, field(2, VALUES) + field(1, "x") + field(2, FLOAT) + field(2, SHAPE_2)),
    "numbers in pieces": field(
        2, field(1, "x") + field(2, FLOAT + field(5, VALUES[2:6])) + field(2, SHAPE_2 + field(5, VALUES[6:]))
    ),
    "an empty piece": field(2, field(2, "") + field(1, "x") + field(2, TENSOR)),
    "twice": entry("x", FLOAT + SHAPE_2) + entry("x", TENSOR),
    "twice, first unreadable": entry("x", FLOAT + field(4, "?")) + entry("x", TENSOR),
    "three times": entry("x", TENSOR) + entry("x", FLOAT + field(4, "?")) + entry("x", TENSOR),
    "unknown fields": varint_field(2, 1) + entry("x", group(99) + TENSOR + varint_field(5, 1)) + group(100),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS.keys())
def test_other_forms_of_one_input(data: bytes) -> None:
    assert plain(decoded(SPEC + data)) == outcome(SPEC + entry("x", TENSOR))


@pytest.mark.parametrize("unknown", [varint_field(3, 1), group(4), field(9, "?"), varint_field(2, 1)])
def test_entries_with_more_in_them_are_unknown(unknown: bytes) -> None:
    assert decoded(field(2, field(1, "x") + unknown + field(2, TENSOR))).inputs == []


def test_missing_names() -> None:
    assert plain(decoded(field(2, field(2, TENSOR)))) == outcome(entry("", TENSOR))
    # No tensor is one without a type.
    for data in (field(2, field(1, "x")), entry("x", b"")):
        assert (decoded(data).inputs, list(decoded(data).unreadable)) == ([], ["x"])
    assert list(decoded(field(2, "")).unreadable) == [""]
    last_unreadable = decoded(entry("x", TENSOR) + entry("x", FLOAT + field(4, "?")))
    assert (last_unreadable.inputs, list(last_unreadable.unreadable)) == ([], ["x"])


def test_unreadable_tensors_are_kept_for_later() -> None:
    """Which model is asked for, and whether it has such an input, comes first."""
    bad = {
        "a": SHAPE_2 + VALUES,
        "b": FLOAT + field(2, field(2, varint_field(1, -1))),
        "c": TENSOR + field(4, "abc"),
    }
    request = decoded(SPEC + b"".join(entry(name, tensor) for name, tensor in bad.items()) + entry("x", TENSOR))
    assert sorted(request.unreadable) == ["a", "b", "c"]
    assert [tensor.name for tensor in request.inputs] == ["x"]


@pytest.mark.parametrize(
    "data",
    [
        field(1, "?"),
        field(2, "?"),
        field(2, field(1, b"\xff") + field(2, TENSOR)),
        field(2, field(1, b"\xff") + field(1, "x") + field(2, TENSOR)),
        field(2, field(1, "x") + field(2, "?")),
        field(2, field(1, "x") + field(2, FLOAT + b"\x12") + field(11, "?")),
        field(2, field(1, "x") + field(2, TENSOR + b"\x0a\5") + field(2, "12345")),
        entry("x", FLOAT + field(5, bytes(5))),
        entry("x", FLOAT + SHAPE_2 + field(4, bytes(8)) + field(6, bytes(5))),
        entry("x", FLOAT + field(2, "?")),
        entry("x", "?") + entry("x", TENSOR),
        field(3, b"\xff"),
        field(1, field(1, b"\xff")),
        entry("x", TENSOR)[:-1],
    ],
)
def test_bytes_that_are_no_request(data: bytes) -> None:
    assert refusal(SPEC + data) == ""


@pytest.mark.parametrize(
    ("piece", "name"),
    [(lambda at: entry(f"{at}", b""), "inputs"), (lambda at: field(3, ""), "names in output_filter")],
)
def test_limits(piece: Any, name: str) -> None:
    most = b"".join(piece(at) for at in range(1024))
    decoded(most)
    assert refusal(most + piece(1024)) == f"the request has more than 1024 {name}"


def test_the_fields_of_an_entry_are_bounded() -> None:
    """There may be a thousand entries, and each field costs the same time."""
    data = PADDING + field(2, field(1, "x") * FEW_FIELDS + field(2, TENSOR))
    assert outcome(data) == f"the request has more than {FEW_FIELDS} protobuf fields"


def test_large_tensors_are_views_of_the_request() -> None:
    content = tensor_pb2.TensorProto(dtype=tensor_pb2.DT_FLOAT, tensor_content=bytes(SCAN_FROM_BYTES))
    content.tensor_shape.dim.add(size=SCAN_FROM_BYTES // 4)
    packed = tensor_pb2.TensorProto.FromString(content.SerializeToString())
    packed.tensor_content = b""
    packed.float_val.extend([0.5] * (SCAN_FROM_BYTES // 4))
    for tensor in (content, packed):
        data = SPEC + entry("x", tensor.SerializeToString())
        view = decode_predict(data).inputs[0].data
        assert isinstance(view, memoryview)
        assert view.obj is data


TENSORS = st.randoms(use_true_random=False).map(odd_tensor)
REQUESTS = st.builds(
    predict_pb2.PredictRequest,
    model_spec=st.none()
    | st.builds(
        lambda name, version: {"name": name} | ({} if version is None else {"version": {"value": version}}),
        st.text(max_size=3),
        st.none() | st.integers(-(2**63), 2**63 - 1),
    ),
    inputs=st.dictionaries(st.sampled_from(["x", "y", "", "é12"]), TENSORS, max_size=3),
    output_filter=st.lists(st.text(max_size=2), max_size=3),
)


@given(REQUESTS, UNKNOWN_FIELDS)
def test_small_and_large_requests_have_one_outcome(message: Any, unknown: bytes) -> None:
    expected = plain(decoded(message.SerializeToString()))
    assert len(expected[1]) + len(expected[3]) == len(message.inputs)
    assert plain(decoded(unknown + message.SerializeToString())) == expected


@given(REQUESTS, st.data())
def test_damaged_requests_have_one_outcome(message: Any, draw: st.DataObject) -> None:
    data = draw.draw(damaged(message.SerializeToString()))
    # What stands in a tensor's handles and variants is not looked at in large requests.
    assume(not {field(14, "")[0], field(15, "")[0]} & set(data))
    assert outcome(data) == outcome(PADDING + data)


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    assert outcome(data) == outcome(PADDING + data)
    outcome(data + PADDING)  # The end may run into the padding: then they differ.


FILL = """
import re, sys
from pathlib import Path
from triglot.protocols.tfserving.codec import decode_predict

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

data = sys.stdin.buffer.read()
before = peak()
print(len(decode_predict(data).unreadable), peak() - before)
"""


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["small", "large"])
def test_what_is_filled_is_bounded_for_all_inputs_together(padding: bytes) -> None:
    def zeros(count: int) -> bytes:
        return FLOAT + field(2, field(2, varint_field(1, count)))

    command = [sys.executable, "-c", FILL]
    for count, unreadable in ((16 * MIB // 100, 0), (16 * MIB, 100)):
        data = b"".join(entry(f"{at}", zeros(count)) for at in range(100)) + padding
        done = subprocess.run(command, input=data, capture_output=True, check=True)
        names, grown = map(int, done.stdout.split())
        assert (names, grown < 80 * MIB) == (unreadable, True)


def test_a_response() -> None:
    y = OutputTensor("y", "FP32", np.array([3.0], "f4"))
    s = OutputTensor("é", "BYTES", object_array([b"a"], (1, 1)))
    response = InferenceResponse("m", "123", "", [y, s])
    vector_shape, pair = {"dim": [{"size": 1}]}, {"dim": [{"size": 1}, {"size": 1}]}
    spec = {"name": "m", "version": {"value": 123}, "signature_name": "s"}
    tensor = tensor_pb2.TensorProto
    outputs = {
        "y": tensor(dtype=tensor_pb2.DT_FLOAT, tensor_shape=vector_shape, float_val=[3]),
        "é": tensor(dtype=tensor_pb2.DT_STRING, tensor_shape=pair, string_val=[b"a"]),
    }
    read = predict_pb2.PredictResponse.FromString
    assert read(encode_predict(response, "s")) == predict_pb2.PredictResponse(model_spec=spec, outputs=outputs)
    raw = struct.pack("<f", 3)
    outputs["y"] = tensor(dtype=tensor_pb2.DT_FLOAT, tensor_shape=vector_shape, tensor_content=raw)
    content = encode_predict(response, "s", as_content=True)
    assert read(content) == predict_pb2.PredictResponse(model_spec=spec, outputs=outputs)


def test_what_is_encoded_element_by_element() -> None:
    def size(datatype: str) -> int:
        output = OutputTensor("y", datatype, np.zeros((10, 10), DATATYPES[datatype].dtype))
        return encoding_size(InferenceResponse("m", "1", "", [output, output]))

    assert {name for name in DATATYPES if not size(name)} == {"FP32", "FP64", "BOOL", "COMPLEX64", "COMPLEX128"}
    assert size("INT8") == size("BYTES") > 200
