"""The sample calls, for every datatype, read as the protocols read them; and the lines that a start prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import numpy as np
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
from triglot.protocols.sample_calls import sample_calls
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
    config = Config(**options)  # type: ignore[arg-type]  # Any option.
    return hint_lines(list(models), config, 1, 2, {"monitor": "/"})[1:]


def body(line: str) -> str:
    """What a curl line sends."""
    words = shlex.split(line)
    return words[words.index("-d") + 1]


def sample(model: ModelMetadata, protocol: str) -> tuple[bytes, str]:
    """The JSON that a sample call of the protocol sends over REST, and that of its gRPC message."""
    (call,) = sample_calls(model, [protocol])
    return json.dumps(call.body).encode(), json.dumps(call.message)


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
    rest, message = sample(model, "kserve")
    read = kserve_rest.decode_infer(HttpRequest({"model": "m"}, {}, rest))
    check(model.signature, read.request.inputs, shape)
    kserve = json_format.Parse(message, inference_pb2.ModelInferRequest())
    check(model.signature, kserve_codec.decode_infer(kserve.SerializeToString()).inputs, shape)

    if datatype == "UINT16":
        assert sample_calls(model, ["tfserving", "grps"]) == []
        return
    check_grps(model, shape)
    rest, message = sample(model, "tfserving")
    predict = rest_predict.decode_predict(rest, lambda _: model.signature)
    check(model.signature, predict.inputs, shape)
    tfserving = json_format.Parse(message, predict_pb2.PredictRequest())
    check(model.signature, tfserving_codec.decode_predict(tfserving.SerializeToString()).inputs, shape)


def check_grps(model: ModelMetadata, shape: Sequence[int]) -> None:
    """The samples of grps' lines are what the model takes, where grps has the datatype."""
    if model.signature.inputs[0].datatype in ("BOOL", "UINT32", "UINT64"):
        assert sample_calls(model, ["grps"]) == []
        return
    rest, sent = sample(model, "grps")
    message = json_reader.read_message(rest)
    assert message.model == "m-1"
    check(model.signature, bind_message(message, model.signature, "m"), shape)
    encoded = json_format.Parse(sent, grps_pb2.GrpsMessage()).SerializeToString()
    check(model.signature, bind_message(grps_codec.decode_message(encoded), model.signature, "m"), shape)


def test_a_grps_project_takes_what_it_declares() -> None:
    """Where it says nothing, only its author knows what it takes."""
    unknown = ModelMetadata("m", ["1"], "grps", Signature((), (), any_tensors=True), decoupled=False)
    assert lines(unknown) == []
    signature = Signature([TensorSpec("x", "FP32", [-1])], OUTPUTS, any_tensors=True)
    known = ModelMetadata("known", ["1"], "grps", signature, decoupled=False)
    (curl,) = lines(unknown, known, protocols="grps")
    assert "-H 'Content-Type: application/json'" in curl
    tensor = {"name": "x", "dtype": "DT_FLOAT32", "shape": [1], "flat_float32": [1.5]}
    assert json.loads(body(curl)) == {"model": "known-1", "gtensors": {"tensors": [tensor]}}
    assert "/v2/models/known/predict" in lines(known)[-1]
    # It reads the bodies of grps' HTTP itself.
    assert lines(known, protocols="grps", grps_customized_body=True) == []


@pytest.mark.parametrize("datatype", sorted(WITHOUT_SAMPLE | {"UINT16"}))
def test_an_answer_that_tensorflow_serving_cannot_print(datatype: str) -> None:
    """REST has no JSON for it (tfs 4.4)."""
    signature = Signature([TensorSpec("x", "FP32", [-1])], [TensorSpec("y", datatype, [-1])])
    model = ModelMetadata("m", ["1"], "python", signature, decoupled=False)
    assert sample_calls(model, ["tfserving"]) == []
    assert len(sample_calls(model, ["kserve", "tfserving"])) == 1


def test_a_line_for_the_pages_one_for_the_command_line_and_one_for_rest() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    monitor, infer, curl = hint_lines([model], Config(), 1, 2, {"monitor": "/"})
    assert monitor == "# monitor: http://127.0.0.1:2/"
    assert infer.endswith("triglot infer m --url 127.0.0.1:1")
    assert curl == """curl -s http://127.0.0.1:2/v2/models/m/predict -d '{"x": [1.5]}'"""
    assert lines(model, protocols="tfserving,grps") == [
        """curl -s http://127.0.0.1:2/v1/models/m:predict -d '{"inputs": {"x": [1.5]}}'"""
    ]
    assert hint_lines([model], Config(), 8001, 2, {})[0].endswith("triglot infer m")


def test_lines_have_the_example_of_the_model() -> None:
    inputs = [
        TensorSpec("x", "FP32", [-1, 2]),
        TensorSpec("city", "BYTES", [-1]),
        TensorSpec("n", "INT64", [-1], True),
    ]
    signature = Signature(inputs, OUTPUTS)
    rows = {"x": np.arange(0.1, 40.1).reshape(20, 2), "city": ["Köln"] * 20}
    example, *others = (
        {"x": [[0.1, 2]], "city": ["it's"]},
        {"city": ["no x"]},
        {"x": [[np.nan, 1]], "city": ["a"]},
    )

    def shown(example: object) -> list[str]:
        return lines(ModelMetadata("m", ["1"], "p", signature, False, example=example))  # type: ignore[arg-type]

    infer, curl = shown(example)
    assert shlex.split(infer)[-5:-2] == ["m", "x=[[0.1, 2.0]]", 'city=["it\'s"]']
    assert json.loads(body(curl)) == {"x": [[0.1, 2.0]], "city": ["it's"]}
    infer, curl = shown([rows, example])  # Too large for a line: the first row of the first.
    assert json.loads(body(curl)) == {"x": [[0.1, 1.1]], "city": ["Köln"]}
    assert all("1.5" in shown(other)[1] for other in others)


def test_lines_of_a_server_with_tls() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    files = {"tls_certificate": "c.pem", "tls_key": "c.key"}
    (curl,) = lines(model, **files)
    assert curl.startswith("curl -sk https://127.0.0.1:2/v2/models/m/predict ")
    assert lines(model, tls_client_ca="ca.pem", **files) == []


def test_lines_of_a_server_with_an_access_file() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    assert ' -H "authorization: Bearer $TRIGLOT_TOKEN" -d ' in lines(model, access="access.toml")[-1]


def test_only_open_ports() -> None:
    model = metadata(TensorSpec("x", "FP32", [-1]))
    assert [" infer m" in line for line in lines(model, rest_port=-1)] == [True]
    assert ["/predict" in line for line in lines(model, grpc_port=-1)] == [True]
    assert lines(model, grpc_port=-1, rest_port=-1, grpc_socket="/s") == []


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
    # KServe's protocol can call what has no inputs, and what streams.
    assert bool(lines(model, protocols="kserve")) == (model.signature.inputs == () or model.decoupled)
    assert "/v1/models/good:predict" in lines(model, good, protocols="tfserving")[-1]


def test_names_are_quoted() -> None:
    model = metadata(TensorSpec("it's", "FP32", [1]), name="a b'c")
    infer, curl = lines(model)
    assert shlex.split(infer)[2] == "a b'c"
    assert shlex.split(curl)[2] == "http://127.0.0.1:2/v2/models/a%20b%27c/predict"
    assert json.loads(body(curl)) == {"it's": [1.5]}
