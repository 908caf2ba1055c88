"""SavedModels with outputs and inputs of every kind, in every form, and with operations of other libraries."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests import saved_models
from tests.e2e.server_process import QUICK, ServerProcess
from tests.kept_files import kept_files
from tests.process import Triglot
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import Status, failure, predict, predict_request, statuses
from triglot.pb.tfserving import tensor_pb2

# The models are TensorFlow's own: another environment of these tests changes nothing.
pytestmark = pytest.mark.newest

CANNOT_BE_RETURNED = {
    "sparse": "it is a sparse tensor, of three tensors",
    "ragged": "it is a composite tensor (RAGGED_TENSOR_SPEC)",
    "variant": "it is of the datatype DT_VARIANT",
    "resource": "it is of the datatype DT_RESOURCE",
}
NOT_RETURNED = "unexpected inference output 'other' for model 'kinds', which cannot return it: "
NOT_CALLED = "input 'x' is a sparse tensor, of three tensors"
PACKAGES = {
    "needs_text": ("TFText>WhitespaceTokenizeWithOffsetsV2", "tensorflow_text", "'tensorflow-text==2."),
    "needs_old_text": ("WordpieceTokenizeWithOffsets", "tensorflow_text", "'tensorflow-text==2."),
    "needs_forests": (
        "SimpleMLCreateModelResource",
        "tensorflow_decision_forests",
        "tensorflow-decision-forests",
    ),
}
TENSORFLOW_TEXT = "tensorflow-text==2.21.1"
MODELS = ("kinds", "unusable", "text", "triton_text", "needs_unknown", *PACKAGES)


@pytest.fixture(scope="module")
def server(tensorflow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = saved_models.write(tmp_path_factory.mktemp("kinds"), *MODELS, script="tf_kinds_models.py")
    with ServerProcess(str(folder), "--no-exit-on-load-error", python=tensorflow) as process:
        yield process


@pytest.fixture
def rest(server: ServerProcess) -> Rest:
    return Rest(int(server.rest_address.rpartition(":")[2]))


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc_channel(int(server.grpc_address.rpartition(":")[2])) as channel:
        yield channel


def ask_v2(rest: Rest, signature: str, *outputs: str, model: str = "kinds") -> tuple[int, Any]:
    """Return the status and, by name, the outputs, or the error."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [0.0, 1.0]}
    asked = {"outputs": [{"name": name} for name in outputs]} if outputs else {}
    body = {"inputs": [tensor], "parameters": {"signature_name": signature}, **asked}
    status, answer = rest.post(f"/v2/models/{model}/infer", body)
    if status == 200:
        return status, {tensor["name"]: tensor["data"] for tensor in answer["outputs"]}
    return status, answer["error"].removeprefix("[request id: <id_unknown>] ")


def ask(channel: grpc.Channel, signature: str, *outputs: str) -> dict[str, tensor_pb2.TensorProto]:
    """Return the outputs of Predict."""
    request = predict_request("kinds", [0.0, 1.0])
    request.model_spec.signature_name = signature
    request.output_filter.extend(outputs)
    return dict(predict(channel, request).outputs)


@pytest.mark.parametrize("kind", ["checked", "endless", "quantized", *CANNOT_BE_RETURNED])
def test_another_outputs_error_cost_or_kind_does_not_matter(kind: str, rest: Rest, channel: grpc.Channel) -> None:
    outputs = ask(channel, kind, "y")
    assert {name: list(tensor.float_val) for name, tensor in outputs.items()} == {"y": [0.0, 2.0]}
    assert ask_v2(rest, kind, "y") == (200, {"y": [0.0, 2.0]})


def test_an_output_that_fails_does_so_where_it_is_requested(rest: Rest, channel: grpc.Channel) -> None:
    for outputs in ((), ("other",), ("y", "other")):
        code, text = failure(lambda outputs=outputs: ask(channel, "checked", *outputs))  # type: ignore[misc]
        assert (code, text.partition(" ")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "not")
        assert ask_v2(rest, "checked", *outputs)[0] == 400


def test_ai_platform_gets_a_graphs_error_without_the_operations_place(rest: Rest) -> None:
    body = {"signature_name": "checked", "instances": [0.0, 1.0]}
    status, answer = rest.post("/v1/projects/p/models/kinds:predict", body)
    assert (status, answer) == (400, {"error": "not finite : Tensor had Inf values"})
    _, answer = rest.post("/v1/models/kinds:predict", body)
    assert answer["error"].startswith("not finite : Tensor had Inf values\n\t [[{{node ")


@pytest.mark.parametrize(("kind", "why"), CANNOT_BE_RETURNED.items())
def test_an_output_that_cannot_be_returned(kind: str, why: str, rest: Rest, channel: grpc.Channel) -> None:
    """TensorFlow Serving's clients get all outputs without a filter, V2's those in the metadata."""
    text = f"{NOT_RETURNED}{why}"
    for outputs in ((), ("other",), ("y", "other")):
        assert failure(lambda outputs=outputs: ask(channel, kind, *outputs)) == (  # type: ignore[misc]
            grpc.StatusCode.INVALID_ARGUMENT,
            text,
        )
    body = {"signature_name": kind, "instances": [0.0, 1.0]}
    assert rest.post("/v1/models/kinds:predict", body) == (400, {"error": text})
    assert ask_v2(rest, kind, "other") == (400, text)
    assert ask_v2(rest, kind) == (200, {"y": [0.0, 2.0]})


def test_a_signature_without_an_output_that_can_be_returned(rest: Rest, channel: grpc.Channel) -> None:
    text = f"{NOT_RETURNED}{CANNOT_BE_RETURNED['sparse']}"
    assert ask_v2(rest, "only_sparse") == (400, text)
    assert failure(lambda: ask(channel, "only_sparse")) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_quantized_outputs(rest: Rest, channel: grpc.Channel) -> None:
    """As TensorFlow Serving's: over gRPC the integers, none in JSON."""
    tensor = ask(channel, "quantized")["other"]
    assert (tensor.dtype, list(tensor.int_val)) == (tensor_pb2.DT_QUINT8, [0, 255])
    body = {"signature_name": "quantized", "instances": [0.0, 1.0]}
    assert rest.post("/v1/models/kinds:predict", body) == (
        400,
        {"error": "Failed to write JSON value for tensor type: quint8"},
    )


def test_an_unknown_output_is_an_error_that_lists_all(channel: grpc.Channel) -> None:
    assert failure(lambda: ask(channel, "sparse", "nope")) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "output tensor alias not found in signature: nope Outputs expected to be in the set {other,y}.",
    )


def test_a_signature_that_cannot_be_called(rest: Rest, channel: grpc.Channel) -> None:
    why = f" (it is in the model's file, but {NOT_CALLED})"
    assert failure(lambda: ask(channel, "takes_sparse")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f'Serving signature key "takes_sparse" not found.{why}',
    )
    body = {"signature_name": "takes_sparse", "instances": [0.0]}
    status, answer = rest.post("/v1/models/kinds:predict", body)
    assert (status, answer["error"]) == (
        400,
        f'Serving signature name: "takes_sparse" not found in signature def{why}',
    )
    status, text = ask_v2(rest, "takes_sparse")
    assert status == 400
    assert text.endswith(why)


def index(rest: Rest) -> dict[str, tuple[str, str]]:
    """Return the state of each model in RepositoryIndex, and its reason."""
    _, rows = rest.post("/v2/repository/index", {})
    return {row["name"]: (row["state"], row.get("reason", "")) for row in rows}


def test_the_state_of_a_model_says_what_cannot_be_used(rest: Rest, channel: grpc.Channel) -> None:
    state, reason = index(rest)["kinds"]
    assert state == "READY"
    texts = [f"signature 'takes_sparse' cannot be called: {NOT_CALLED}"]
    texts += [
        f"signature '{kind}': output 'other' cannot be returned: {why}" for kind, why in CANNOT_BE_RETURNED.items()
    ]
    for text in texts:
        assert text in reason
    assert statuses(channel, "kinds") == [Status(1, "AVAILABLE", reason)]
    assert index(rest)["text"] == ("READY", "")


def test_a_model_that_cannot_be_used_at_all(rest: Rest, channel: grpc.Channel, server: ServerProcess) -> None:
    state, reason = index(rest)["unusable"]
    assert state == "UNAVAILABLE"
    assert reason.endswith(
        f": the SavedModel has no usable signature: signature 'serving_default' cannot be called: {NOT_CALLED}"
    )
    assert ask_v2(rest, "", model="unusable") == (
        404,
        f"Request for unknown model: 'unusable' has no available versions: {reason}",
    )
    assert failure(lambda: predict(channel, predict_request("unusable", [1.0]))) == (
        grpc.StatusCode.NOT_FOUND,
        f"Servable not found for request: Latest(unusable): {reason}",
    )
    assert statuses(channel, "unusable") == [Status(1, "END", reason, "UNKNOWN")]


@pytest.mark.parametrize("model", ["text", "triton_text"])
def test_saved_models_in_text_form(model: str, rest: Rest) -> None:
    """`saved_model.pbtxt`, which TensorFlow reads as well as the binary form."""
    assert rest.post(f"/v1/models/{model}:predict", {"instances": [1.5]}) == (200, {"predictions": [3.0]})


# --- operations of other libraries ---


@pytest.mark.parametrize("model", PACKAGES)
def test_operations_of_a_package_that_is_not_installed(model: str, rest: Rest) -> None:
    operation, module, requirement = PACKAGES[model]
    state, reason = index(rest)[model]
    assert state == "UNAVAILABLE"
    problem = f": its operation {operation} needs {module}, which is not installed; run: pip install {requirement}"
    assert problem in reason


def test_unknown_operations(rest: Rest) -> None:
    state, reason = index(rest)["needs_unknown"]
    assert state == "UNAVAILABLE"
    assert "Op type not registered 'NobodyKnowsThis'" in reason
    assert reason.endswith("; name the shared library that has it in --tensorflow-op-libraries")


MICROFRONTEND = "lite/experimental/microfrontend/python/ops/_audio_microfrontend_op.so"
"""A library of operations that comes with TensorFlow, which does not load it."""


@pytest.mark.parametrize("command", ["serve", "tfserving"])
def test_operations_of_a_library_that_an_option_names(command: str, tensorflow: Path, tmp_path: Path) -> None:
    folder = saved_models.write(tmp_path, "needs_library", script="tf_kinds_models.py")
    (library,) = tensorflow.parents[1].glob(f"lib/python*/site-packages/tensorflow/{MICROFRONTEND}")
    flags = {
        "serve": (str(folder), "--tensorflow-op-libraries", str(library)),
        "tfserving": (
            f"--model_base_path={folder / 'needs_library'}",
            "--model_name=needs_library",
            f"--tensorflow_op_libraries={library}",
        ),
    }
    with ServerProcess(*flags[command], command=command, python=tensorflow) as server:
        rest = Rest(int(server.rest_address.rpartition(":")[2]))
        status, answer = rest.post("/v1/models/needs_library:predict", {"instances": [0] * 1600})
        assert (status, len(answer["predictions"][0])) == (200, 32)


@pytest.fixture(scope="module")
def tensorflow_text(tensorflow: Path) -> Path:
    """A folder with tensorflow-text, which the environment of TensorFlow lacks."""

    def install(folder: Path) -> None:
        pip = [str(tensorflow), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), TENSORFLOW_TEXT], check=True)

    return kept_files(tensorflow.parents[1], "tensorflow_text", TENSORFLOW_TEXT, install)


def test_operations_of_a_package_that_is_installed(
    tensorflow: Path, tensorflow_text: Path, tmp_path: Path
) -> None:
    """tensorflow-text is imported for a model that needs it, by whichever of its operations."""
    saved_models.write(tmp_path, "text_operations", script="tf_text_models.py", packages=tensorflow_text)
    variables = QUICK | {"PYTHONPATH": str(tensorflow_text)}
    with Triglot(tmp_path, environment=variables, python=tensorflow) as server:
        rest = Rest(server.ports()[1])
        for signature, value in {
            "whitespace": [["A", "b-c"]],
            "split": [["A b", "c"]],
            "fold": ["a b-c"],
            "normalize": ["A b-c"],
        }.items():
            body = {"signature_name": signature, "instances": ["A b-c"]}
            assert rest.post("/v1/models/text_operations:predict", body) == (200, {"predictions": value})
        server.stop()
