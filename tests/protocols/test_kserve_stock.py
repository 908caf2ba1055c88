"""Our bytes under tritonclient's protobuf classes, and the other way round."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import environments
from tests.protocols.wire_bytes import PADDING, field, group, packed, varint_field
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, object_array, pack_bytes, raw_buffer
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import decode_infer, encode_infer

SCRIPT = Path(__file__).parent / "clients" / "triton_messages.py"


def output(name: str, shape: tuple[int, ...]) -> OutputTensor:
    count = int(np.prod(shape))
    if name == "BYTES":
        elements = [b"\xff\0", b"", "é".encode(), b"plain"][:count]
        return OutputTensor(f"BYTES {shape}", "BYTES", object_array(elements, shape))
    dtype = DATATYPES[name].dtype
    numbers = np.linspace(0 if name[0] == "U" else -100, 100, count) if name != "BOOL" else np.arange(count) % 2
    return OutputTensor(f"{name} {shape}", name, numbers.astype(dtype).reshape(shape))


# The client has no complex ones.
V2_DATATYPES = [name for name in DATATYPES if name not in TFSERVING_DATATYPES]
OUTPUTS = [output(name, shape) for name in V2_DATATYPES for shape in ((2, 2), (1,), (0, 3), ())]
PARAMETERS: dict[str, Any] = {"flag": False, "count": -1, "text": "", "ratio": 0.5}
RESPONSES = [
    InferenceResponse("m", "1", "7", OUTPUTS, PARAMETERS),
    InferenceResponse("", "", "", []),
    InferenceResponse("é", "10", "", [OutputTensor("big", "FP32", np.arange(50_000, dtype="f4"))]),
]
# A request that no usual client writes: mixed order, pieces, unknown fields.
CONTENTS = field(5, field(2, packed([7]))) + field(5, varint_field(2, 8))
ODD_REQUEST = b"".join(
    [
        field(5, CONTENTS + field(2, "INT32") + field(1, "x") + varint_field(3, 2)),
        group(100, field(1, "?")),
        field(1, "other"),
        field(4, field(1, "k") + field(2, varint_field(2, 1))),
        field(1, "m"),
        field(6, field(1, "y") + varint_field(99, 1)),
    ]
)


def raw_of(tensor: OutputTensor) -> bytes:
    if tensor.datatype == "BYTES":
        return pack_bytes(tensor.array.ravel().tolist())
    buffer: Any = raw_buffer(tensor.array)
    return b"".join([buffer])


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What tritonclient makes of the job."""
    job = {
        "tensors": [
            {"name": o.name, "datatype": o.datatype, "shape": o.array.shape, "raw": raw_of(o).hex()}
            for o in OUTPUTS
        ],
        "outputs": ["y", "z"],
        "requests": [ODD_REQUEST.hex()],
        "responses": [encode_infer(response).hex() for response in RESPONSES],
    }
    command = [str(environments.python("tritonclient")), str(SCRIPT)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["as sent", "large"])
def test_a_request_that_tritonclient_makes(answer: dict[str, Any], padding: bytes) -> None:
    request = decode_infer(bytes.fromhex(answer["request"]) + padding)
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "7")
    assert request.outputs == ["y", "z"]
    assert request.parameters == {
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": False,
        "priority": 2,
        "timeout": 1000,
        "k": "v",
    }
    assert len(request.inputs) == len(OUTPUTS)
    for tensor, sent in zip(request.inputs, OUTPUTS, strict=True):
        assert (tensor.name, tensor.datatype, tensor.shape) == (sent.name, sent.datatype, sent.array.shape)
        assert not isinstance(tensor.data, np.ndarray)
        assert bytes(tensor.data) == raw_of(sent), tensor.name


def test_responses_as_tritonclient_returns_them(answer: dict[str, Any]) -> None:
    for outputs, response in zip(answer["outputs"], RESPONSES, strict=True):
        expected = [
            [
                o.name,
                o.datatype,
                list(o.array.shape),
                [element.hex() for element in o.array.ravel()] if o.datatype == "BYTES" else raw_of(o).hex(),
            ]
            for o in response.outputs
        ]
        assert outputs == expected


def test_messages_that_tritonclient_has_read_and_written(answer: dict[str, Any]) -> None:
    written = [bytes.fromhex(wire) for wire in answer["written"]]
    request = decode_infer(written[0])
    odd = decode_infer(ODD_REQUEST)
    assert request.inputs[0].shape == odd.inputs[0].shape == (2,)
    for tensor in (request.inputs[0], odd.inputs[0]):
        assert isinstance(tensor.data, np.ndarray)
        assert tensor.data.tolist() == [7, 8]
    assert (request.model_name, request.outputs, request.parameters) == ("m", ["y"], {"k": 1})
    for wire, response in zip(written[1:], RESPONSES, strict=True):
        assert pb.ModelInferResponse.FromString(wire) == pb.ModelInferResponse.FromString(encode_infer(response))
