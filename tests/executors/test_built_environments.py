"""Python environments that models in MLflow's format describe, built with pip, of packages that lie here."""

from __future__ import annotations

import json
import platform
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="the dev environment has it")

from onnx import helper

from tests.process import FREE_PORTS, Triglot, run_triglot
from tests.protocol_clients.rest import Rest
from triglot.executors.process.packages import build

FLOAT = 1
MINOR = ".".join(platform.python_version_tuple()[:2])
TENSOR = [{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1]}}]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a repository with a model, `double`. Its list of packages is this environment's, as one package."""
    wheel = tmp_path / "wheels" / "these_packages-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    information = "these_packages-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("these.pth", "\n".join(path for path in sys.path if path.endswith("site-packages")))
        file.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: these-packages\nVersion: 1.0\n")
        file.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{information}/RECORD", "")
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheel.parent),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)

    def write(**files: Any) -> Path:
        folder = tmp_path / "models" / "double"
        folder.mkdir(parents=True)
        tensor = helper.make_tensor_value_info
        node = helper.make_node("Add", ["x", "x"], ["y"])
        graph = helper.make_graph([node], "g", [tensor("x", FLOAT, ["n"])], [tensor("y", FLOAT, ["n"])])
        opsets = [helper.make_opsetid("", 13)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        mlmodel = {"flavors": {"onnx": {"data": "model.onnx"}}, "signature": {"inputs": json.dumps(TENSOR)}}
        # JSON is YAML.
        for name, content in {"MLmodel": mlmodel, "python_env_yaml": {"python": f"{MINOR}.99"}, **files}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name.replace("_yaml", ".yaml").replace("_txt", ".txt")).write_text(text)
        return folder.parent

    return write


def called(server: Triglot) -> Any:
    _, port = server.ports()
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]
    status, answer = Rest(port).post("/v2/models/double/infer", {"inputs": inputs})
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def serving(folder: Path, *flags: str) -> Triglot:
    return Triglot(folder, *FREE_PORTS, "--drain-delay", "0", *flags)


def test_environment_is_built_when_the_server_starts(written: Callable[..., Path], tmp_path: Path) -> None:
    folder = written(requirements_txt="these-packages\n")
    for is_new in (True, False):
        with serving(folder, "--build-environments", "start") as server:
            assert called(server) == [2, 4]
            (python,) = (tmp_path / "cache").glob("triglot/environments/*/folder/bin/python")
            assert python.exists()
            server.stop()
            log = server.stderr.text()
        assert ("requirements.txt: building a Python environment with pip, in" in log) is is_new


def test_a_client_has_none_built_unless_it_may(written: Callable[..., Path]) -> None:
    packages = [f"python={MINOR}.1", "pip<99", {"pip": ["these-packages"]}]
    folder = written(conda_yaml={"dependencies": packages})
    for when, loads in (("start", False), ("always", True), ("start", True)):
        with serving(folder, "--model-control-mode", "explicit", "--build-environments", when) as server:
            status, answer = Rest(server.ports()[1]).post("/v2/repository/models/double/load", {})
            assert (status == 200) is loads, answer
            if loads:
                assert called(server) == [2, 4]
            else:
                assert "conda.yaml: the model's Python environment is not built yet; --build" in answer["error"]
            server.stop()


def test_error_says_what_failed(written: Callable[..., Path]) -> None:
    folder = written(requirements_txt="these-packages\nno-such-package==1\n")
    done = run_triglot("serve", folder, *FREE_PORTS, "--build-environments", "start")
    assert done.returncode == 1
    assert "requirements.txt: not a usable Python environment: " in done.stderr
    assert "ERROR: No matching distribution found for no-such-package==1" in done.stderr


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"conda.yaml": {"dependencies": ["cudatoolkit=11"]}}, "cudatoolkit=11 is a package of conda's"),
        ({"conda.yaml": []}, "expected a mapping, got list"),
        ({"conda.yaml": {"dependencies": ["python=2.1.9"]}}, "expected a python2.1 on the PATH"),
        ({"requirements.txt": [], "python_env.yaml": {"python": "2.1.9"}}, "expected a python2.1 on the PATH"),
    ],
)
def test_what_cannot_be_built(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=text):
        build(tmp_path / next(iter(files)), tmp_path / "environment", lambda *_: None)
