"""The sample calls, for every datatype, read as the protocols read them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import pytest
from google.protobuf import json_format

from triglot.config.options import Config
from triglot.core.http import HttpRequest
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES
from triglot.core.types import InferenceRequest, InputTensor, TensorSpec
from triglot.model.signature import ModelMetadata, Signature
from triglot.model.validation import bind_inputs
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2
from triglot.protocols.grps import codec as grps_codec
from triglot.protocols.grps import json_reader
from triglot.protocols.grps.mapping import bind_message
from triglot.protocols.kserve import codec as kserve_codec
from triglot.protocols.kserve import rest as kserve_rest
from triglot.protocols.tfserving import codec as tfserving_codec
from triglot.protocols.tfserving import rest_predict
from triglot.run import hint_lines

WITHOUT_SAMPLE = {"FP16", "BF16", *TFSERVING_DATATYPES}
SHAPES = {"scalar": ([], ()), "any": ([-1], (1,)), "nested": ([2, -1, 3], (2, 1, 3))}
OUTPUTS = [TensorSpec("y", "FP32", [-1])]


def metadata(
    *inputs: TensorSpec, name: str = "m", method: str = "predict", decoupled: bool = False, sequences: bool = False
) -> ModelMetadata:
    return ModelMetadata(
        name, ["1"], "python", Signature(inputs, OUTPUTS, method=method), decoupled, sequences=sequences
    )


def lines(*models: ModelMetadata, **options: object) -> list[str]:
    return hint_lines(list(models), Config(**options), 1, 2)  # type: ignore[arg-type]  # Any option.


def body(line: str) -> str:
    """What a curl or grpcurl line sends."""
    words = shlex.split(line)
    return words[words.index("-d") + 1]


def check(signature: Signature, inputs: list[InputTensor], shape: Sequence[int]) -> None:
    """The one input has the shape, and elements that are neither zero nor empty."""
    (array,) = bind_inputs(signature, InferenceRequest("m", inputs=inputs)).values()
    assert array.shape == shape
    samples: dict[str, object] = {"O": b"text", "b": True, "f": 1.5}
    assert array.ravel().tolist() == [samples.get(array.dtype.kind, 1)] * array.size


@pytest.mark.parametrize("datatype", sorted(set(DATATYPES) - WITHOUT_SAMPLE))
@pytest.mark.parametrize("case", SHAPES)
def test_every_protocol_understands_its_line(datatype: str, case: str) -> None:
    declared, shape = SHAPES[case]
    model = metadata(TensorSpec("x", datatype, declared))
    curl, _, grpcurl = lines(model, protocols="kserve")
    read = kserve_rest.decode_infer(HttpRequest({"model": "m"}, {}, body(curl).encode()))
    check(model.signature, read.request.inputs, shape)
    kserve = json_format.Parse(body(grpcurl), inference_pb2.ModelInferRequest())
    check(model.signature, kserve_codec.decode_infer(kserve.SerializeToString()).inputs, shape)

    if datatype == "UINT16":
        assert lines(model, protocols="tfserving,grps") == []
        return
    check_grps(model, shape)
    curl, _, grpcurl = lines(model, protocols="tfserving")
    predict = rest_predict.decode_predict(body(curl).encode(), lambda _: model.signature)
    check(model.signature, predict.inputs, shape)
    tfserving = json_format.Parse(body(grpcurl), predict_pb2.PredictRequest())
    check(model.signature, tfserving_codec.decode_predict(tfserving.SerializeToString()).inputs, shape)


def check_grps(model: ModelMetadata, shape: Sequence[int]) -> None:
    """The samples of grps' lines are what the model takes, where grps has the datatype."""
    given = lines(model, protocols="grps")
    if model.signature.inputs[0].datatype in ("BOOL", "UINT32", "UINT64"):
        assert given == []
        return
    curl, _, grpcurl = given
    message = json_reader.read_message(body(curl).encode())
    assert message.model == "m-1"
    check(model.signature, bind_message(message, model.signature, "m"), shape)
    encoded = json_format.Parse(body(grpcurl), grps_pb2.GrpsMessage()).SerializeToString()
    check(model.signature, bind_message(grps_codec.decode_message(encoded), model.signature, "m"), shape)


def test_a_grps_project_takes_what_it_declares() -> None:
    """Where it says nothing, only its author knows what it takes."""
    unknown = ModelMetadata("m", ["1"], "grps", Signature((), (), any_tensors=True), decoupled=False)
    assert lines(unknown) == []
    signature = Signature([TensorSpec("x", "FP32", [-1])], OUTPUTS, any_tensors=True)
    known = ModelMetadata("known", ["1"], "grps", signature, decoupled=False)
    curl, python, grpcurl = lines(unknown, known, protocols="grps")
    tensor = {"name": "x", "dtype": "DT_FLOAT32", "shape": [1], "flat_float32": [1.5]}
    message = {"model": "known-1", "gtensors": {"tensors": [tensor]}}
    assert json.loads(body(curl)) == json.loads(body(grpcurl)) == message
    assert "{'Content-Type': 'application/json'}" in python
    assert "/v2/models/known/infer" in lines(known)[0]
    # It reads the bodies of grps' HTTP itself.
    assert lines(known, protocols="grps", grps_customized_body=True) == []


@pytest.mark.parametrize("datatype", sorted(WITHOUT_SAMPLE | {"UINT16"}))
def test_an_answer_that_tensorflow_serving_cannot_print(datatype: str) -> None:
    """REST has no JSON for it (tfs 4.4)."""
    signature = Signature([TensorSpec("x", "FP32", [-1])], [TensorSpec("y", datatype, [-1])])
    model = ModelMetadata("m", ["1"], "python", signature, decoupled=False)
    assert lines(model, protocols="tfserving") == []
    assert len(lines(model, protocols="kserve,tfserving")) == 3


def test_every_protocol() -> None:
    v2, v1, grps, python, grpcurl = lines(metadata(TensorSpec("x", "FP32", [-1])))
    assert v2.startswith("curl -s http://127.0.0.1:2/v2/models/m/infer -d ")
    assert v1 == """curl -s http://127.0.0.1:2/v1/models/m:predict -d '{"inputs": {"x": [1.5]}}'"""
    assert grps.startswith(
        "curl -s http://127.0.0.1:2/grps/v1/infer/predict -H 'Content-Type: application/json' -d "
    )
    assert "http://127.0.0.1:2/v2/models/m/infer" in python
    assert grpcurl.endswith(" 127.0.0.1:1 inference.GRPCInferenceService/ModelInfer")


def test_lines_of_a_server_with_tls() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    files = {"tls_certificate": "c.pem", "tls_key": "c.key"}
    curl, python, grpcurl = lines(model, protocols="kserve", **files)
    assert curl.startswith("curl -sk https://127.0.0.1:2/v2/models/m/infer ")
    assert "urlopen('https://127.0.0.1:2/" in python
    assert "import ssl, urllib.request" in python
    assert ", context=ssl._create_unverified_context())" in python
    assert grpcurl.startswith("grpcurl -insecure -d ")
    assert lines(model, protocols="kserve", tls_client_ca="ca.pem", **files) == []


def test_lines_of_a_server_with_an_access_file() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    curl, python, grpcurl = lines(model, protocols="grps", access="access.toml")
    assert ' -H "authorization: Bearer $TRIGLOT_TOKEN" -d ' in curl
    assert "import os, urllib.request" in python
    assert "'application/json', 'authorization': 'Bearer ' + os.environ['TRIGLOT_TOKEN']}" in python
    assert grpcurl.startswith('grpcurl -plaintext -H "authorization: Bearer $TRIGLOT_TOKEN" -d ')


def test_only_open_ports() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    assert [line.split()[0] for line in lines(model, rest_port=-1)] == ["grpcurl"]
    assert [line.split()[0] for line in lines(model, grpc_port=-1)] == ["curl"] * 3 + ["python3"]
    assert [line.split()[0] for line in lines(model, grpc_port=-1, rest_port=-1, grpc_socket="/s")] == []


@pytest.mark.parametrize(
    "model",
    [
        metadata(TensorSpec("x", "FP32", None)),
        metadata(TensorSpec("x", "FP32", [17])),
        metadata(TensorSpec("x", "FP16", [1])),
        metadata(TensorSpec("x", "FP32", [1]), decoupled=True),
        metadata(TensorSpec("x", "FP32", [1]), sequences=True),
        metadata(),
        metadata(TensorSpec("inputs", "BYTES", [-1]), method="classify"),
    ],
)
def test_no_line_for_what_cannot_work(model: ModelMetadata) -> None:
    good = metadata(TensorSpec("x", "FP32", [-1]), name="good")
    assert lines(model, protocols="tfserving") == []
    # KServe's protocol can call what has no inputs.
    assert bool(lines(model, protocols="kserve")) == (model.signature.inputs == ())
    assert json.loads(body(lines(model, good, protocols="tfserving")[-1]))["model_spec"] == {"name": "good"}


def test_names_are_quoted() -> None:
    model = metadata(TensorSpec("it's", "FP32", [1]), name="a b'c")
    curl, _, grpcurl = lines(model, protocols="tfserving")
    words = shlex.split(curl)
    assert words[2] == "http://127.0.0.1:2/v1/models/a%20b%27c:predict"
    assert json.loads(body(curl)) == {"inputs": {"it's": [1.5]}}
    assert json.loads(body(grpcurl))["model_spec"] == {"name": "a b'c"}
