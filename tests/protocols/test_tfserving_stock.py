"""Our bytes under TensorFlow's own classes and parsers, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import environments
from tests.process import outcome, start_python
from tests.protocols.odd_tensors import odd_tensors
from tests.protocols.wire_bytes import PADDING, field
from triglot.core.tensor import DATATYPES, Array, object_array
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.tfserving.codec import ModelSpec, decode_predict, encode_predict
from triglot.protocols.tfserving.tensor import TYPES

SCRIPT = Path(__file__).parent / "clients" / "tensorflow_messages.py"
RUN_SECONDS = 300
SHAPES = ((2, 2), (1,), (5,), (0, 3), (), (1, 1, 1))


def array_of(datatype: str, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return object_array([b"\xff\0", b"", "é".encode(), b"plain", b"\0"][:count], shape)
    numbers: Array = np.linspace(0 if datatype[0] == "U" else -100, 100, count)
    if datatype == "BOOL":
        numbers = np.arange(count) % 2
    if datatype.startswith("COMPLEX"):
        numbers = numbers * (1 - 2j)
    return numbers.astype(DATATYPES[datatype].dtype).reshape(shape)


ARRAYS = [(datatype, array_of(datatype, shape)) for datatype in DATATYPES for shape in SHAPES]
SPECIAL = [float("nan"), float("inf"), float("-inf"), -0.0]
ARRAYS += [
    (datatype, np.array(SPECIAL, DATATYPES[datatype].dtype)) for datatype in ("FP16", "BF16", "FP32", "FP64")
]


def elements_of(array: Array) -> Any:
    """Elements as they travel to the script and back."""
    if array.dtype.hasobject:
        return [element.hex() for element in array.ravel().tolist()]
    return array.tobytes().hex()


def plain(tensor: InputTensor) -> list[Any]:
    data = tensor.data
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, DATATYPES[tensor.datatype].dtype)
    return [TYPES[tensor.datatype], list(tensor.shape), elements_of(array)]


OUTPUTS = [OutputTensor(f"{at}", datatype, array) for at, (datatype, array) in enumerate(ARRAYS)]
RESPONSES = [
    InferenceResponse("m", "3", "", OUTPUTS),
    InferenceResponse("é", "9223372036854775807", "", []),
    InferenceResponse("m", "1", "", [OutputTensor("big", "FP32", np.arange(50_000, dtype="f4"))]),
]


ODD = [message.SerializeToString() for message in odd_tensors(3000)]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TensorFlow makes of the job."""
    job = {
        "arrays": [
            [pb.DataType.Name(TYPES[datatype]), array.shape, elements_of(array)] for datatype, array in ARRAYS
        ],
        "tensors": [wire.hex() for wire in ODD],
        "responses": [
            encode_predict(response, "s", as_content=as_content).hex()
            for response in RESPONSES
            for as_content in (False, True)
        ],
    }
    file = tmp_path_factory.mktemp("job") / "job.json"
    file.write_text(json.dumps(job))
    done = outcome(start_python([str(SCRIPT), str(file)], environments.python("tensorflow")), RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def request_with(wire: bytes) -> bytes:
    return field(2, field(1, "x") + field(2, wire))


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["as sent", "large"])
def test_tensors_that_tensorflow_makes(answer: dict[str, Any], padding: bytes) -> None:
    assert len(answer["made"]) == len(ARRAYS)
    for wire, (datatype, array) in zip(answer["made"], ARRAYS, strict=True):
        request = decode_predict(request_with(bytes.fromhex(wire)) + padding)
        assert plain(request.inputs[0]) == [TYPES[datatype], list(array.shape), elements_of(array)]


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["as sent", "large"])
def test_a_request_that_tensorflow_makes(answer: dict[str, Any], padding: bytes) -> None:
    request = decode_predict(bytes.fromhex(answer["request"]) + padding)
    assert request.spec == ModelSpec("m", 3, None, "s")
    assert list(request.output_filter) == ["y", "z"]
    assert request.unreadable == {}
    assert {tensor.name: plain(tensor) for tensor in request.inputs} == {
        f"{at}": [TYPES[datatype], list(array.shape), elements_of(array)]
        for at, (datatype, array) in enumerate(ARRAYS)
    }


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["as sent", "large"])
def test_tensors_are_what_tensorflow_takes_them_for(answer: dict[str, Any], padding: bytes) -> None:
    """Right and wrong ones, with too much and too little in them."""
    refused = 0
    for wire, parsed in zip(ODD, answer["parsed"], strict=True):
        request = decode_predict(request_with(wire) + padding)
        refused += parsed is None
        text = str(pb.TensorProto.FromString(wire))
        assert (plain(request.inputs[0]) if request.inputs else None) == parsed, text
    assert 0.05 < refused / len(answer["parsed"]) < 0.5


def test_responses_as_tensorflow_returns_them(answer: dict[str, Any]) -> None:
    expected: list[Any] = []
    for response in RESPONSES:
        spec = [response.model_name, int(response.model_version), "s", ""]
        outputs = {
            output.name: [TYPES[output.datatype], list(output.array.shape), elements_of(output.array)]
            for output in response.outputs
        }
        expected += [[spec, outputs]] * 2
    read = [[spec, {name: output[:3] for name, output in outputs.items()}] for spec, outputs in answer["outputs"]]
    assert read == expected


def test_the_form_of_outputs(answer: dict[str, Any]) -> None:
    """Typed fields unless the other form is asked for; strings always."""
    for at, (_, outputs) in enumerate(answer["outputs"]):
        for dtype, shape, _, fields in outputs.values():
            if 0 not in shape:
                assert ("tensor_content" in fields) == (at % 2 == 1 and dtype != pb.DT_STRING)
            assert "tensor_shape" in fields
