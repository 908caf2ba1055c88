"""KServe V2 messages: the bytes that clients send, and what becomes of them."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.protocols.wire_bytes import PADDING, field, fixed32_field, packed, varint_field
from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.tensor import DATATYPES, Array, datatype_of, object_array, pack_bytes
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import SCAN_FROM_BYTES, InferDecoder, decode_infer, encode_infer

Contents = pb.InferTensorContents
Parameter = pb.InferParameter
A1 = bytes.fromhex("0a016d 1a0137 2a0d 0a0178 120446503332 1a020102 3203 0a0179 3a08 0000803f 00000040")
A2 = bytes.fromhex("0a016d 120131 1a0137 2a0d 0a0179 120446503332 1a020101 3204 00004040")


def with_contents(datatype: str, contents: pb.InferTensorContents, shape: list[int]) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape, contents=contents)
    return pb.ModelInferRequest(model_name="m", inputs=[tensor]).SerializeToString()


def with_parameters(**parameters: pb.InferParameter) -> bytes:
    return pb.ModelInferRequest(model_name="m", parameters=parameters).SerializeToString()


def refusal(data: bytes, kind: type[ServingError] = InvalidArgument) -> str:
    """The text of the error, which is the same on the large path."""
    texts = []
    for request in (data, data + PADDING):
        with pytest.raises(kind) as caught:
            decode_infer(request)
        texts.append(caught.value.message)
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("data", [A1, A1 + PADDING, PADDING + A1], ids=["small", "large", "large, padding first"])
def test_golden_request(data: bytes) -> None:
    request = decode_infer(data)
    tensor = request.inputs[0]
    assert (request.model_name, request.model_version, request.id) == ("m", "", "7")
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", "FP32", (1, 2))
    assert isinstance(tensor.data, bytes | memoryview)
    assert bytes(tensor.data) == struct.pack("<2f", 1.0, 2.0)
    assert (list(request.outputs), request.parameters) == (["y"], {})


def test_golden_response() -> None:
    output = OutputTensor("y", "FP32", np.array([[3.0]], "f4"))
    encoded = encode_infer(InferenceResponse("m", "1", "7", [output]))
    # Fields may come in any order.
    assert len(encoded) == len(A2)
    assert pb.ModelInferResponse.FromString(encoded) == pb.ModelInferResponse.FromString(A2)


def test_golden_bytes_tensor() -> None:
    output = OutputTensor("y", "BYTES", object_array([b"ab", b""], (2,)))
    message = pb.ModelInferResponse.FromString(encode_infer(InferenceResponse("m", "1", "", [output])))
    assert [raw.hex() for raw in message.raw_output_contents] == ["020000006162" + "00000000"]


@pytest.mark.parametrize(
    ("key", "entry", "value"),
    [
        ("sequence_id", "1202 1005", 5),
        ("sequence_start", "1202 0801", True),
        ("sequence_end", "1202 0800", False),
        ("priority", "1202 2802", 2),
        ("timeout", "1203 10e807", 1000),
        ("k", "1203 1a0176", "v"),
    ],
)
def test_golden_parameters(key: str, entry: str, value: Any) -> None:
    data = field(4, field(1, key) + bytes.fromhex(entry))
    for request in (data, data + PADDING):
        decoded = decode_infer(request).parameters
        assert decoded == {key: value}
        assert type(decoded[key]) is type(value)


@pytest.mark.parametrize(
    "value", [True, False, 0, -5, 2**63 - 1, -(2**63), 1.5, float("inf"), "", "é", "a" * 1000], ids=repr
)
def test_parameters_round_trip(value: Any) -> None:
    encoded = encode_infer(InferenceResponse("m", "1", "", [], {"k": value}))
    message = pb.ModelInferResponse.FromString(encoded)
    data = pb.ModelInferRequest(model_name="m", parameters=message.parameters).SerializeToString()
    assert decode_infer(data).parameters == {"k": value}


@pytest.mark.parametrize(
    ("key", "parameter", "expected"),
    [
        ("sequence_id", Parameter(bool_param=True), "int64_param or string_param"),
        ("sequence_id", Parameter(double_param=1), "int64_param or string_param"),
        ("sequence_start", Parameter(int64_param=1), "bool_param"),
        ("sequence_end", Parameter(string_param="true"), "bool_param"),
        ("priority", Parameter(bool_param=True), "int64_param or uint64_param"),
        ("priority", Parameter(string_param="1"), "int64_param or uint64_param"),
        ("priority", Parameter(int64_param=-1), "int64_param or uint64_param"),
        ("timeout", Parameter(double_param=1), "int64_param"),
        ("timeout", Parameter(int64_param=-1), "int64_param"),
        ("binary_data_output", Parameter(int64_param=1), "bool_param"),
        ("triton_enable_empty_final_response", Parameter(string_param=""), "bool_param"),
    ],
)
def test_reserved_parameters_of_another_kind(key: str, parameter: pb.InferParameter, expected: str) -> None:
    assert refusal(with_parameters(**{key: parameter})).startswith(
        f"parameter '{key}': expected {expected} (JSON: "
    )


@pytest.mark.parametrize(
    ("key", "parameter", "text"),
    [
        ("triton_other", Parameter(int64_param=1), "parameter 'triton_other': names that begin with 'triton_'"),
        ("headers", Parameter(string_param="a"), "parameter 'headers': the name is reserved"),
        (
            "k",
            Parameter(uint64_param=1),
            "parameter 'k': expected bool_param, int64_param, string_param or double",
        ),
        (
            "timeout",
            Parameter(uint64_param=1),
            "parameter 'timeout': expected bool_param, int64_param, string_param",
        ),
        (
            "k",
            Parameter(),
            "parameter 'k': expected bool_param, int64_param, string_param or double_param, got no",
        ),
    ],
)
def test_parameters_that_are_refused(key: str, parameter: pb.InferParameter, text: str) -> None:
    assert refusal(with_parameters(**{key: parameter})).startswith(text)


@pytest.mark.parametrize(
    ("key", "parameter", "value"),
    [
        ("sequence_id", Parameter(string_param="u1"), "u1"),
        ("priority", Parameter(int64_param=1), 1),
        ("priority", Parameter(uint64_param=2**64 - 1), 2**64 - 1),
        ("triton_enable_empty_final_response", Parameter(bool_param=False), False),
    ],
)
def test_reserved_parameters_have_these_kinds(key: str, parameter: pb.InferParameter, value: Any) -> None:
    assert decode_infer(with_parameters(**{key: parameter})).parameters == {key: value}


def test_unknown_parameters_of_tensors_are_ignored() -> None:
    message = pb.ModelInferRequest.FromString(A1)
    message.inputs[0].parameters["binary_data_size"].int64_param = 8
    message.inputs[0].parameters["content_type"].string_param = "np"
    message.outputs[0].parameters["binary_data"].bool_param = True
    assert decode_infer(message.SerializeToString()).outputs == ["y"]


TYPED: list[tuple[str, str, list[Any]]] = [
    ("BOOL", "bool_contents", [True, False]),
    ("INT8", "int_contents", [-128, 127]),
    ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
    ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
    ("UINT8", "uint_contents", [0, 255]),
    ("UINT16", "uint_contents", [0, 2**16 - 1]),
    ("UINT32", "uint_contents", [0, 2**32 - 1]),
    ("UINT64", "uint64_contents", [0, 2**64 - 1]),
    ("FP32", "fp32_contents", [1.5, float("-inf")]),
    ("FP64", "fp64_contents", [0.1, float("inf")]),
    ("BYTES", "bytes_contents", [b"", b"\xff\x00"]),
]


@pytest.mark.parametrize(("datatype", "member", "values"), TYPED)
@pytest.mark.parametrize("padding", [b"", PADDING])
def test_typed_contents(datatype: str, member: str, values: list[Any], padding: bytes) -> None:
    for elements in (values, []):
        data = with_contents(datatype, Contents(**{member: elements}), [len(elements)])
        array = decode_infer(data + padding).inputs[0].data
        assert isinstance(array, np.ndarray)
        assert array.dtype == DATATYPES[datatype].dtype
        assert array.shape == (len(elements),)
        assert array.tolist() == elements


@pytest.mark.parametrize(
    ("datatype", "member", "value", "bounds"),
    [
        ("INT8", "int_contents", 128, "[-128, 127]"),
        ("INT8", "int_contents", -129, "[-128, 127]"),
        ("INT16", "int_contents", 2**15, "[-32768, 32767]"),
        ("UINT8", "uint_contents", 256, "[0, 255]"),
        ("UINT16", "uint_contents", 2**16, "[0, 65535]"),
    ],
)
def test_typed_values_out_of_range(datatype: str, member: str, value: int, bounds: str) -> None:
    elements: dict[str, Any] = {member: [0, value]}
    assert refusal(with_contents(datatype, Contents(**elements), [2])) == (
        f"{member} of input tensor 'x' for model 'm' hold a value outside {datatype}'s range {bounds}"
    )


@pytest.mark.parametrize(
    ("datatype", "member"), [(row[0], row[1]) for row in TYPED] + [("FP16", ""), ("BF16", "")]
)
def test_typed_contents_in_another_field(datatype: str, member: str) -> None:
    for other_type, other, values in TYPED:
        if other != member:
            says = {"int_contents": "INT32", "uint_contents": "UINT32"}.get(other, other_type)
            assert refusal(with_contents(datatype, Contents(**{other: values}), [2])) == (
                f"unexpected explicit tensor data for input tensor 'x' for model 'm' of type '{says}', "
                f"expected datatype '{datatype}'"
            )


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_no_contents_for_a_datatype_without_a_field(datatype: str) -> None:
    data = decode_infer(with_contents(datatype, Contents(), [0])).inputs[0].data
    assert isinstance(data, np.ndarray)
    assert data.size == 0


def test_contents_of_an_unknown_datatype_are_left_to_the_validator() -> None:
    assert decode_infer(with_contents("FP31", Contents(), [1])).inputs[0].datatype == "FP31"


@pytest.mark.parametrize(
    "contents", [Contents(fp32_contents=[1, 2]), Contents(int_contents=[0]), Contents(bytes_contents=[b""])]
)
def test_contents_and_raw_may_not_be_mixed(contents: pb.InferTensorContents) -> None:
    mixed = pb.ModelInferRequest.FromString(A1)
    mixed.inputs[0].contents.CopyFrom(contents)
    assert refusal(mixed.SerializeToString()) == (
        "contents field must not be specified when using raw_input_contents for 'x' for model 'm'"
    )
    mixed.ClearField("raw_input_contents")
    mixed.inputs.add(name="y", datatype="FP32", shape=[1])
    mixed.raw_input_contents.append(bytes(4))
    assert "must not be specified" in refusal(mixed.SerializeToString())


@pytest.mark.parametrize("contents", [b"", field(6, b"")])
def test_empty_contents_with_raw_tensors_are_absent(contents: bytes) -> None:
    """MLServer's client (1.7.1) writes them."""
    tensor = field(1, "x") + field(2, "FP32") + field(3, b"\2") + field(5, contents)
    raw = bytes(range(8))
    for padding in (b"", field(7, bytes(SCAN_FROM_BYTES))):
        second = field(5, tensor.replace(b"x", b"y", 1)) if padding else b""
        data = field(1, "m") + field(5, tensor) + second + field(7, raw) + padding
        assert bytes(decode_infer(data).inputs[0].data) == raw
        assert bytes(InferDecoder()(data).inputs[0].data) == raw


def test_no_data() -> None:
    message = pb.ModelInferRequest.FromString(A1)
    message.inputs.add(name="y", datatype="FP32", shape=[1])
    text = "unable to find data for input tensor 'y' for model 'm' in request."
    assert refusal(message.SerializeToString()) == text
    message.raw_input_contents.append(bytes(4))
    assert [bytes(tensor.data) for tensor in decode_infer(message.SerializeToString()).inputs] == [
        A1[-8:],
        bytes(4),
    ]


def test_raw_entries_without_an_input() -> None:
    assert refusal(A1 + field(7, "more")) == (
        "the request has 2 raw_input_contents for 1 inputs that take one, for model 'm'"
    )
    assert "has 1 raw_input_contents for 0 inputs" in refusal(field(1, "m") + field(7, ""))


def test_raw_tensors_of_a_large_request_are_views_of_it() -> None:
    data = A1[:-10] + field(7, bytes(SCAN_FROM_BYTES))
    tensor = decode_infer(data).inputs[0]
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is data


def test_unpacked_and_split_typed_contents() -> None:
    """A numeric field may come number by number, in pieces, and in pieces of the message that holds it."""
    first = field(5, varint_field(2, 1) + field(2, packed([2, 3])) + varint_field(2, -4))
    second = field(5, field(2, packed([5])))
    data = field(5, field(1, "x") + first + field(2, "INT32") + second + varint_field(3, 5)) + field(1, "m")
    for request in (data, data + PADDING):
        tensor = decode_infer(request).inputs[0]
        assert isinstance(tensor.data, np.ndarray)
        assert (tensor.data.tolist(), tensor.shape) == ([1, 2, 3, -4, 5], (5,))


def test_unpacked_floats() -> None:
    contents = fixed32_field(6, struct.pack("<f", 1.5)) + field(6, struct.pack("<2f", 2, 3))
    tensor = decode_infer(field(5, field(2, "FP32") + field(5, contents))).inputs[0]
    assert isinstance(tensor.data, np.ndarray)
    assert tensor.data.tolist() == [1.5, 2, 3]


ARRAYS = st.one_of(
    hnp.arrays(
        st.sampled_from([row.dtype for row in DATATYPES.values() if row.name not in ("BF16", "BYTES")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    hnp.arrays(np.uint16, (2, 3)).map(lambda array: array.view(ml_dtypes.bfloat16)),
    st.lists(st.binary(max_size=9), max_size=5).map(lambda items: object_array(items, (len(items), 1))),
)


def raw_of(tensor: InputTensor) -> bytes:
    assert not isinstance(tensor.data, np.ndarray)
    return bytes(tensor.data)


@given(st.lists(ARRAYS, max_size=4), st.booleans(), st.text(max_size=5))
def test_what_is_encoded_decodes_to_the_same(arrays: list[Array], large: bool, request_id: str) -> None:
    outputs = [OutputTensor(f"t{at}", datatype_of(array), array) for at, array in enumerate(arrays)]
    wire = encode_infer(InferenceResponse("m", "3", request_id, outputs))
    response = pb.ModelInferResponse.FromString(wire)
    assert len(response.raw_output_contents) == len(response.outputs) == len(arrays)
    request = pb.ModelInferRequest(
        model_name=response.model_name,
        model_version=response.model_version,
        id=response.id,
        inputs=[{"name": o.name, "datatype": o.datatype, "shape": o.shape} for o in response.outputs],
        raw_input_contents=response.raw_output_contents,
    )
    back = decode_infer(request.SerializeToString() + (PADDING if large else b""))
    assert (back.model_name, back.model_version, back.id) == ("m", "3", request_id)
    for tensor, output in zip(back.inputs, outputs, strict=True):
        assert (tensor.name, tensor.datatype, tensor.shape) == (output.name, output.datatype, output.array.shape)
        elements = output.array.ravel().tolist()
        raw = pack_bytes(elements) if output.datatype == "BYTES" else output.array.tobytes()
        assert raw_of(tensor) == raw
