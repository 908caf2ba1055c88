"""The sample commands that a started server prints work as they are pasted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

import triglot
from process import Triglot, clean_environment

SECONDS = 30
DEMO = Path(triglot.__file__).parent / "demo"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def hints(server: ServerProcess) -> str:
    """What the server printed; the grpcurl line is the last."""
    return printed(server)


@pytest.fixture(scope="module")
def tfserving_hints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `triglot tfserving` prints for one of the demo models."""
    base_path = tmp_path_factory.mktemp("half")
    shutil.copytree(DEMO / "half_plus_three", base_path / "1")
    environment = {"TRIGLOT_HOST": "127.0.0.1", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_REST_PORT": "0"}
    arguments = (f"--model_base_path={base_path}", "--model_name=half")
    with Triglot(*arguments, command="tfserving", environment=environment) as server:
        yield printed(server)


def printed(server: Triglot) -> str:
    server.stdout.wait_for(re.compile("^grpcurl .*\n", re.MULTILINE))
    return server.stdout.text()


def paste(command: str, programs: Path | None = None) -> str:
    """What the line prints; `programs`: a folder that the shell finds more of them in."""
    environment = clean_environment()
    if programs is not None:
        environment["PATH"] = f"{programs}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def line(hints: str, program: str, part: str = "") -> str:
    (found,) = [line for line in hints.splitlines() if line.startswith(f"{program} ") and part in line]
    return found


def python_lines(hints: str) -> str:
    found = re.search(r"^python3 <<'END'\n.*?^END$", hints, re.MULTILINE | re.DOTALL)
    assert found
    return found[0] + "\n"


def test_nothing_else_is_printed(hints: str, tfserving_hints: str) -> None:
    curl, others = r"curl [^\n]+\n", r"python3 <<'END'\n.+\nEND\ngrpcurl [^\n]+\n"
    assert re.fullmatch(3 * curl + others, hints, re.DOTALL), hints
    assert re.fullmatch(curl + others, tfserving_hints, re.DOTALL), tfserving_hints


@needs_curl
def test_curl(hints: str) -> None:
    check_rest_answer(paste(line(hints, "curl", "/v2/")))


@needs_curl
def test_curl_as_a_client_of_tensorflow_serving(hints: str, tfserving_hints: str) -> None:
    command = line(hints, "curl", "/v1/models/half_plus_three:predict")
    assert json.loads(paste(command)) == {"outputs": [3.75]}
    command = line(tfserving_hints, "curl", "/v1/models/half:predict")
    assert json.loads(paste(command)) == {"outputs": [3.75]}


@needs_curl
def test_curl_as_a_client_of_grps(hints: str) -> None:
    answer = json.loads(paste(line(hints, "curl", "/grps/v1/infer/predict")))
    assert answer["status"] == {"code": 200, "msg": "OK", "status": "SUCCESS"}
    assert answer["gtensors"]["tensors"] == [
        {"name": "y", "dtype": "DT_FLOAT32", "shape": [1], "flat_float32": [3.75]}
    ]


def test_python(hints: str, tfserving_hints: str) -> None:
    check_rest_answer(paste(python_lines(hints)))
    assert json.loads(paste(python_lines(tfserving_hints))) == {"outputs": [3.75]}


def check_rest_answer(text: str) -> None:
    answer = json.loads(text)
    assert answer["model_name"] == "half_plus_three"
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1], "data": [3.75]}]


def test_grpcurl(hints: str, tfserving_hints: str, grpcurl: Path) -> None:
    answer = json.loads(paste(line(hints, "grpcurl"), grpcurl.parent))
    assert answer["modelName"] == "half_plus_three"
    assert answer["rawOutputContents"] == ["AABwQA=="]
    command = line(tfserving_hints, "grpcurl", "tensorflow.serving.PredictionService/Predict")
    answer = json.loads(paste(command, grpcurl.parent))
    assert answer["modelSpec"]["name"] == "half"
    assert answer["outputs"]["y"]["floatVal"] == [3.75]
