"""What TensorFlow Serving answers, call by call: our answers are the same with either program.

Each case runs with Python models, which need nothing, and with SavedModels in TensorFlow's environment.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import environments, saved_models
from tests.cases.case_lines import Answer, Line, call, check, load, send
from tests.cases.case_servers import ROUTES, ROUTINE, Address, Servers, write_python_models
from tests.kept_files import kept_files
from tests.waiting import wait_until

pytestmark = pytest.mark.both_transports


def named_after_aliases(line: Line) -> Line:
    """Metadata of a Python model: it has no graph, so its tensors are named after the inputs and outputs."""
    line = copy.deepcopy(line)
    for signature in line["json"]["metadata"]["signature_def"]["signature_def"].values():
        for alias, info in (signature["inputs"] | signature["outputs"]).items():
            info["name"] = f"{alias}:0"
    return line


PYTHON_DIFFERS = {"s004-metadata": named_after_aliases}


def cases(*files: str, ml: bool = False) -> list[Any]:
    """The lines of the files as parameters: those for the server of scikit-learn and XGBoost, or all others."""
    return [
        pytest.param(line, id=line["name"])
        for file in files
        for line in load(file)
        if (line.get("server") == "ml") == ml
    ]


def run(line: Line, address: Address) -> None:
    """One case: the call and what is expected of it."""
    line = filled_in(line, address)
    check(line, ask(line, address))
    if "then" in line:
        then = line["then"]
        with suppress(AssertionError):
            wait_until(lambda: holds(then, address))
        check(then, ask(then, address))


def filled_in(line: Line, address: Address) -> Line:
    """The line with what differs from run to run: $MODELS, a folder, and the paths that Vertex AI chooses."""
    text = json.dumps(line)
    for name, value in {"MODELS": str(address.models), **ROUTES}.items():
        text = text.replace(f"${name}", value)
    filled: Line = json.loads(text)
    return filled


def ask(line: Line, address: Address) -> Answer:
    """The answer, over the protocol that the line is for."""
    return send(line, address.rest_port) if "send" in line else call(line, address.channel)


def holds(line: Line, address: Address) -> bool:
    """Whether the answer is the expected one."""
    try:
        check(line, ask(line, address))
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def python_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Python models, served in this environment."""
    models = write_python_models(tmp_path_factory.mktemp("python_models"))
    with Servers(models, tmp_path_factory.mktemp("python_servers")) as servers:
        yield servers


@pytest.fixture(scope="module")
def tensorflow_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The same models as SavedModels, and the prediction routine, served where TensorFlow is installed."""
    python_models = write_python_models(tmp_path_factory.mktemp("models"))
    names = [file.parents[1].name for file in python_models.glob("*/*/model.py")]
    models = saved_models.write(tmp_path_factory.mktemp("saved_models"), *names)
    (python_models / ROUTINE).rename(models / ROUTINE)
    python = environments.python("tensorflow")
    with Servers(models, tmp_path_factory.mktemp("tensorflow_servers"), python) as servers:
        yield servers


@pytest.fixture(scope="module")
def ml_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Models of scikit-learn and XGBoost, served where these are installed."""
    python, script = environments.python("ml"), Path(__file__).with_name("ml_models.py")

    def write(folder: Path) -> None:
        subprocess.run([str(python), str(script), str(folder)], check=True)

    models = kept_files(python.parents[1], "ml_models", script.read_text(), write)
    with Servers(models, tmp_path_factory.mktemp("ml_servers"), python) as servers:
        yield servers


@pytest.mark.parametrize("line", cases("rest.jsonl", "grpc.jsonl", "ai_platform.jsonl"))
def test_python_models(line: Line, python_servers: Servers) -> None:
    if line["name"] in PYTHON_DIFFERS:
        line = PYTHON_DIFFERS[line["name"]](line)
    run(line, python_servers[line.get("server", "models")])


@pytest.mark.both_transports(False)
@pytest.mark.newest
@pytest.mark.parametrize("line", cases("rest.jsonl", "grpc.jsonl", "ai_platform.jsonl"))
def test_saved_models(line: Line, tensorflow_servers: Servers) -> None:
    run(line, tensorflow_servers[line.get("server", "models")])


@pytest.mark.both_transports(False)
@pytest.mark.newest
@pytest.mark.parametrize("line", cases("ai_platform.jsonl", ml=True))
def test_estimators(line: Line, ml_servers: Servers) -> None:
    run(line, ml_servers["ml"])
