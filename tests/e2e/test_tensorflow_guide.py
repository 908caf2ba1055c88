"""The curl lines of TensorFlow Serving's guide against `triglot tfserving`, and gRPC over a Unix socket."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.server_process import QUICK
from tests.process import SECONDS, Triglot, clean_environment, run_triglot
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import Status, predict, predict_request, statuses
from triglot.pb.tfserving import tensor_pb2

MODEL, OF_OLD = "half_plus_two", "half_plus_three_of_old"
PYTHON_MODEL = Path(__file__).parents[1] / "models_tfserving" / MODEL
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
ANY_PORTS = {name: value for name, value in QUICK.items() if not name.endswith("_PORT")}


@dataclass(frozen=True)
class Guide:
    """A running server: gRPC's address and socket, REST's port."""

    grpc_address: str
    socket: Path
    rest_port: str

    def curl(self, arguments: str) -> str:
        """What curl prints; the guide's port is 8501."""
        done = subprocess.run(
            ["bash", "-c", f"curl -s {arguments.replace('localhost:8501', f'localhost:{self.rest_port}')}"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=clean_environment(),
            check=True,
        )
        return done.stdout


@pytest.fixture(scope="module", params=["python", pytest.param("saved_model", marks=pytest.mark.newest)])
def guide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guide]:
    """Half plus two, written in Python and saved by TensorFlow."""
    arguments: dict[str, Any] = {"environment": QUICK}
    base_path = PYTHON_MODEL
    if request.param == "saved_model":
        arguments["python"] = request.getfixturevalue("tensorflow")
        base_path = request.getfixturevalue("models") / MODEL
    socket = tmp_path_factory.mktemp("socket") / "grpc.sock"
    flags = (f"--model_base_path={base_path}", f"--model_name={MODEL}", "--grpc_socket_path", socket)
    with Triglot(*flags, command="tfserving", **arguments) as process:
        found = process.stderr.wait_for(r"gRPC on (\S+) and gRPC on (\S+) and REST on 127\.0\.0\.1:(\d+) in ")
        assert found[2] == str(socket)
        yield Guide(found[1], socket, found[3])
        process.stop()


# --- curl ---


@needs_curl
def test_predict(guide: Guide) -> None:
    url = f"http://localhost:8501/v1/models/{MODEL}"
    body = '{"instances": [1.0, 2.0, 5.0]}'
    text = '{\n    "predictions": [2.5, 3.0, 4.5\n    ]\n}'
    assert guide.curl(f"-d '{body}' -X POST {url}:predict") == text
    assert guide.curl(f"-d '{body}' -X POST {url}/versions/123:predict") == text
    body = '{"signature_name": "serving_default", "inputs": {"x": [[1.0], [2.0]]}}'
    assert json.loads(guide.curl(f"-d '{body}' {url}:predict")) == {"outputs": [[2.5], [3.0]]}


@needs_curl
def test_status(guide: Guide) -> None:
    text = (
        '{\n "model_version_status": [\n  {\n   "version": "123",\n   "state": "AVAILABLE",\n   "status": {\n'
        '    "error_code": "OK",\n    "error_message": ""\n   }\n  }\n ]\n}\n'
    )
    url = f"http://localhost:8501/v1/models/{MODEL}"
    assert guide.curl(url) == text
    assert guide.curl(f"{url}/versions/123") == text


@needs_curl
def test_metadata(guide: Guide) -> None:
    metadata = json.loads(guide.curl(f"http://localhost:8501/v1/models/{MODEL}/metadata"))
    assert metadata["model_spec"] == {"name": MODEL, "version": "123", "signature_name": ""}
    definitions = metadata["metadata"]["signature_def"]["signature_def"]
    assert definitions["serving_default"] == {
        "inputs": {"x": float_column("x:0")},
        "outputs": {"y": float_column("y:0")},
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }
    assert definitions["regress_x_to_y"]["method_name"] == "tensorflow/serving/regress"


def float_column(tensor: str) -> dict[str, Any]:
    dims = [{"size": size, "name": ""} for size in ("-1", "1")]
    return {"dtype": "DT_FLOAT", "tensor_shape": {"dim": dims, "unknown_rank": False}, "name": tensor}


@needs_curl
def test_classify_and_regress(guide: Guide) -> None:
    url = f"http://localhost:8501/v1/models/{MODEL}"
    body = '{"signature_name": "regress_x_to_y", "examples": [{"x": 1.0}, {"x": 2.0}]}'
    assert guide.curl(f"-d '{body}' \\\n  -X POST {url}:regress") == '{\n    "results": [2.5, 3.0]\n}'
    body = '{"signature_name": "classify_x_to_y", "context": {"x": 1.0}, "examples": [{}, {"x": 2.0}]}'
    answer = json.loads(guide.curl(f"-d '{body}' -X POST {url}:classify"))
    assert answer == {"results": [[["", 2.5]], [["", 3.0]]]}


@pytest.fixture(scope="module")
def of_old(tensorflow: Path, models: Path) -> Iterator[Rest]:
    """A model whose signatures say no shapes, and a datatype of examples that is not the graph's."""
    with Triglot(models / OF_OLD, python=tensorflow, environment=QUICK) as process:
        yield Rest(process.ports()[1])
        process.stop()


@pytest.mark.newest
def test_the_regress_example_of_the_documentation(of_old: Rest) -> None:
    body = {"signature_name": "tensorflow/serving/regress", "examples": [{"x": 1.0}, {"x": 2.0}]}
    assert of_old.post(f"/v1/models/{OF_OLD}:regress", body) == (200, {"results": [3.5, 4.0]})


@pytest.mark.newest
def test_a_signature_without_shapes_takes_any(of_old: Rest) -> None:
    url = f"/v2/models/{OF_OLD}"
    status, metadata = of_old.get(url)
    assert (status, metadata["inputs"]) == (200, [{"name": "x", "datatype": "FP32", "shape": [-1]}])
    for shape in ([3], [], [1, 3], [3, 1]):
        count = math.prod(shape)
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [2.0] * count}
        status, answer = of_old.post(f"{url}/infer", {"inputs": [tensor]})
        assert status == 200, answer
        assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": shape, "data": [4.0] * count}]
    assert of_old.post(f"/v1/models/{OF_OLD}:predict", {"instances": [1.0, 2.0]}) == (
        200,
        {"predictions": [3.5, 4.0]},
    )


@needs_curl
def test_an_error(guide: Guide) -> None:
    text = guide.curl("-i -d '{\"instances\": [1.0,5.0]}' -X POST http://localhost:8501/v1/models/half:predict")
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 404 Not Found\n")
    assert "\nContent-Type: application/json\n" in head
    assert json.loads(body) == {"error": "Servable not found for request: Latest(half)"}


# --- tags ---


@pytest.mark.newest
def test_the_tags_of_the_graph(models: Path, tensorflow: Path, tmp_path: Path) -> None:
    shutil.copytree(models / MODEL, tmp_path / MODEL)
    (file,) = (tmp_path / MODEL).glob("*/saved_model.pb")
    tags = b'"\x05serve', b'"\x05train'
    assert file.read_bytes().count(tags[0]) == 1
    file.write_bytes(file.read_bytes().replace(*tags))
    flags = (f"--model_base_path={tmp_path / MODEL}", f"--model_name={MODEL}")
    with Triglot(
        *flags, "--saved_model_tags=train", command="tfserving", environment=QUICK, python=tensorflow
    ) as server:
        answer = Rest(server.ports()[1]).post(f"/v1/models/{MODEL}:predict", {"instances": [1.0]})
        assert answer == (200, {"predictions": [2.5]})
    with Triglot(*flags, command="tfserving", environment=QUICK, python=tensorflow) as other:
        assert other.wait() == 1
    assert "train" in other.stderr.text()


# --- sockets ---


def outputs_over(socket: Path) -> tensor_pb2.TensorProto:
    """What half plus two makes of 1 and 5."""
    # A connection of its own: grpc shares those of equal channels otherwise.
    with grpc.insecure_channel(f"unix:{socket}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        return predict(channel, predict_request(MODEL, [1.0, 5.0])).outputs["y"]


def test_a_unix_socket_besides_the_port(guide: Guide) -> None:
    assert list(outputs_over(guide.socket).float_val) == [2.5, 4.5]
    with grpc.insecure_channel(guide.grpc_address) as channel:
        assert statuses(channel, MODEL) == [Status(123, "AVAILABLE")]


def test_nothing_but_a_unix_socket_and_tensor_content(tmp_path: Path) -> None:
    socket = tmp_path / "grpc.sock"
    flags = (
        f"--model_base_path={PYTHON_MODEL}",
        f"--model_name={MODEL}",
        "--port=0",
        f"--grpc_socket_path={socket}",
        "--enable_serialization_as_tensor_content",
    )
    # The second finds what the first, which is killed, has left there.
    for _ in range(2):
        with Triglot(*flags, command="tfserving", environment=ANY_PORTS) as process:
            found = process.stderr.wait_for(r"I (gRPC on .*) in \d+\.\d\d s\n")
            assert found[1] == f"gRPC on {socket}"
            output = outputs_over(socket)
            assert (output.tensor_content, list(output.float_val)) == (b"\0\0\x20\x40\0\0\x90\x40", [])


def test_a_socket_that_another_server_listens_on(guide: Guide, tmp_path: Path) -> None:
    """gRPC would take its place silently."""
    flags = (f"--model_base_path={tmp_path}", "--port=0", f"--grpc_socket_path={guide.socket}")
    completed = run_triglot("tfserving", *flags)
    assert (completed.returncode, completed.stderr.splitlines()[-1]) == (
        1,
        f"triglot: cannot listen on {guide.socket}: another server uses it",
    )
    assert list(outputs_over(guide.socket).float_val) == [2.5, 4.5]
