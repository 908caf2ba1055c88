"""The client's messages are those that protobuf's own classes read and write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from triglot.client import wire
from triglot.client.calls import outputs_of
from triglot.client.wire import Query
from triglot.core.errors import Internal
from triglot.core.tensor import DATATYPES, Array, datatype_of
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2, tensor_pb2

NUMBERS = [name for name, row in DATATYPES.items() if row.dtype.kind in "biuf"]
NAMES = st.text(min_size=1, max_size=5)


@st.composite
def tensors(draw: st.DrawFn) -> Array:
    """An array of any shape and datatype."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    datatype = draw(st.sampled_from([*NUMBERS, "BF16", "BYTES"]))
    if datatype == "BYTES":
        count = int(np.prod(shape, dtype=int))
        elements = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
        array = np.empty(count, object)
        array[:] = elements
        return array.reshape(shape)
    if datatype == "BF16":
        return draw(arrays.arrays(np.dtype("f4"), tuple(shape))).astype(ml_dtypes.bfloat16)
    return draw(arrays.arrays(DATATYPES[datatype].dtype, tuple(shape)))


def same(left: Array, right: Array) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.tolist() == right.tolist() if left.dtype.hasobject else left.tobytes() == right.tobytes()


INTEGERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(st.booleans(), INTEGERS, st.floats(allow_nan=False), st.text(max_size=5))


@given(
    st.dictionaries(NAMES, tensors(), max_size=3),
    NAMES,
    st.integers(0, 2**31),
    st.dictionaries(NAMES, VALUES, max_size=3),
    st.lists(NAMES, max_size=2),
)
def test_a_v2_request_and_its_echo(
    inputs: dict[str, Array], model: str, version: int, parameters: dict[str, Any], outputs: list[str]
) -> None:
    query = Query(
        model=model, inputs=inputs, version=version, parameters=parameters, outputs=outputs, request_id="7"
    )
    request = inference_pb2.ModelInferRequest.FromString(wire.kserve_request(query))
    assert (request.model_name, request.model_version, request.id) == (model, str(version or ""), "7")
    assert [output.name for output in request.outputs] == outputs
    assert [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in request.inputs] == [
        (name, datatype_of(array), array.shape) for name, array in inputs.items()
    ]
    response = inference_pb2.ModelInferResponse(model_version=request.model_version, id=request.id)
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(raw)
    for name, parameter in request.parameters.items():
        response.parameters[name].CopyFrom(parameter)
    echo = wire.kserve_outputs(response.SerializeToString())
    assert list(echo) == list(inputs)
    assert all(same(echo[name], array) for name, array in inputs.items())
    assert echo.parameters == parameters
    assert {name: type(value) for name, value in echo.parameters.items()} == {
        name: type(value) for name, value in parameters.items()
    }
    assert (echo.model_version, echo.request_id) == (request.model_version, "7")


@pytest.mark.parametrize(
    ("datatype", "field", "elements"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -2.0]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"", b"\xff"]),
    ],
)
def test_typed_contents(datatype: str, field: str, elements: list[Any]) -> None:
    response = inference_pb2.ModelInferResponse()
    response.outputs.add(name="y", datatype=datatype, shape=[2, 1], contents={field: elements})
    array = wire.kserve_outputs(response.SerializeToString())["y"]
    assert array.dtype == DATATYPES[datatype].dtype
    assert array.tolist() == [[element] for element in elements]


@given(st.dictionaries(NAMES, tensors(), max_size=3), NAMES, st.integers(0, 2**62), st.sampled_from(["", "other"]))
def test_a_predict_request_and_its_echo(
    inputs: dict[str, Array], model: str, version: int, signature: str
) -> None:
    query = Query(model=model, inputs=inputs, version=version, signature=signature, outputs=["a", "b"])
    request = predict_pb2.PredictRequest.FromString(wire.predict_request(query))
    spec = request.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == (model, version, signature)
    assert list(request.output_filter) == ["a", "b"]
    response = predict_pb2.PredictResponse(model_spec=spec)
    for name, array in inputs.items():
        tensor = request.inputs[name]
        assert tuple(dim.size for dim in tensor.tensor_shape.dim) == array.shape
        response.outputs[name].CopyFrom(tensor)
    echo = wire.predict_outputs(response.SerializeToString())
    assert all(same(echo[name], array) for name, array in inputs.items())
    assert echo.model_version == str(version or "")


@pytest.mark.parametrize(
    ("dtype", "datatype", "field", "elements", "expected"),
    [
        ("DT_FLOAT", "FP32", "float_val", [0.5, -2.0], [0.5, -2.0]),
        ("DT_FLOAT", "FP32", "float_val", [3.0], [3.0, 3.0]),  # One value fills the shape.
        ("DT_FLOAT", "FP32", "float_val", [], []),
        ("DT_DOUBLE", "FP64", "double_val", [0.1, 1e300], [0.1, 1e300]),
        ("DT_INT8", "INT8", "int_val", [-1, 127], [-1, 127]),
        ("DT_INT64", "INT64", "int64_val", [-1, 2**62], [-1, 2**62]),
        ("DT_UINT32", "UINT32", "uint32_val", [0, 2**32 - 1], [0, 2**32 - 1]),
        ("DT_UINT64", "UINT64", "uint64_val", [0, 2**64 - 1], [0, 2**64 - 1]),
        ("DT_BOOL", "BOOL", "bool_val", [True, False], [True, False]),
        ("DT_HALF", "FP16", "half_val", [0x3C00, 0xC000], [1.0, -2.0]),
        ("DT_BFLOAT16", "BF16", "half_val", [0x3F80, 0xC000], [1.0, -2.0]),
        ("DT_COMPLEX64", "COMPLEX64", "scomplex_val", [1.0, 2.0, 3.0, 4.0], [1 + 2j, 3 + 4j]),
        ("DT_STRING", "BYTES", "string_val", [b"", b"\xff"], [b"", b"\xff"]),
    ],
)
def test_elements_of_tensorflow(
    dtype: str, datatype: str, field: str, elements: list[Any], expected: list[Any]
) -> None:
    response = predict_pb2.PredictResponse()
    tensor = response.outputs["y"]
    tensor.dtype = getattr(tensor_pb2, dtype)
    tensor.tensor_shape.dim.add(size=len(expected))
    getattr(tensor, field).extend(elements)
    array = wire.predict_outputs(response.SerializeToString())["y"]
    assert array.dtype == DATATYPES[datatype].dtype
    assert array.tolist() == expected


def test_arrays_are_views_of_the_message() -> None:
    response = inference_pb2.ModelInferResponse(raw_output_contents=[bytes(4096)])
    response.outputs.add(name="y", datatype="FP32", shape=[1024])
    message = response.SerializeToString()
    array = wire.kserve_outputs(message)["y"]
    assert np.shares_memory(array, np.frombuffer(message, np.uint8))
    assert not array.flags.writeable


@given(st.binary(max_size=60), st.sampled_from([wire.kserve_outputs, wire.predict_outputs]))
def test_what_is_no_message_is_an_error_or_a_message(data: bytes, read: Callable[[bytes], wire.Outputs]) -> None:
    with suppress(Internal):
        outputs_of(read, data)


def test_a_response_cut_anywhere_is_an_error_or_shorter() -> None:
    response = inference_pb2.ModelInferResponse(raw_output_contents=[np.ones(3).tobytes()])
    response.outputs.add(name="y", datatype="FP64", shape=[3])
    message = response.SerializeToString()
    for end in range(len(message)):
        try:
            outputs = wire.kserve_outputs(message[:end])
        except ValueError:
            continue
        assert "y" not in outputs or outputs["y"].size != 3


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (Query(model="m", inputs={}, parameters={"a": None}), "parameter 'a': expected bool, int, float or str"),  # type: ignore[dict-item]
        (Query(model="m", inputs={}, parameters={"a": 2**63}), "parameter 'a': expected an int of 64 bits"),
        (Query(model="m", inputs={"x": np.array("2026-01-01", "M8[D]")}), r"datetime64\[D\] has no datatype"),
    ],
)
def test_what_v2_cannot_express(query: Query, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        wire.kserve_request(query)


def test_what_tensorflow_cannot_express() -> None:
    with pytest.raises(TypeError, match="request_id and shared memory are KServe V2's"):
        wire.predict_request(Query(model="m", inputs={}, request_id="7"))
