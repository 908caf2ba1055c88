"""Libraries that are not installed: what the errors tell to install; and the tests that need them, with them."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.backends import grps_conf
from tests.environment_tests import check_tests
from triglot import backends, parts
from triglot.backends import missing_dependency
from triglot.backends.grps.project import GrpsProject
from triglot.core.errors import MissingDependency
from triglot.parts import BACKENDS, install
from triglot.telemetry.monitor import Monitor

FOLDER = Path(__file__).parent
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
FILE = Path("models/m/1/model.onnx")
MODULES = {
    "PyJWT": "jwt",
    "mlflow-skinny": "mlflow",
    "model-signing": "model_signing",
    "nvidia-ml-py": "pynvml",
    "pyOpenSSL": "OpenSSL",
    "scikit-learn": "sklearn",
}
"""The module of a distribution, where that has another name."""


def requirements() -> dict[str, list[str]]:
    """The names of the distributions of each extra."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    return {
        extra: [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in names]
        for extra, names in extras.items()
    }


def missing(module: str) -> str:
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    return str(missing_dependency(FILE, "the model", error))


def test_what_is_installed_is_what_the_extra_brings() -> None:
    """And every extra of a module is named so, except for what the server does without."""
    for extra, names in requirements().items():
        for name in {*names} - {"pysimdjson", "pandas", "xgboost"}:
            distributions = install(MODULES.get(name, name)).removeprefix("pip install ").replace("'", "").split()
            assert {re.split(r"\W", distribution.replace("-", "_"))[0] for distribution in distributions} == {
                name.replace("-", "_") for name in names
            }, extra


def test_the_smaller_xgboost_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "NVIDIA_DRIVER", tmp_path)
    assert install("xgboost") == "pip install xgboost"
    monkeypatch.setattr(parts, "NVIDIA_DRIVER", tmp_path / "none")
    assert install("xgboost") == "pip install xgboost-cpu"


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"ensemble", "mlserver", "predictor", "python"}))
def test_the_library_of_a_backend_is_an_extra_of_its_name(backend: str) -> None:
    assert backend in requirements()


@pytest.mark.parametrize("below", ["", ".sub.module"])
def test_a_module_of_another_name_than_its_distribution(below: str) -> None:
    assert missing("sklearn" + below) == (
        f"{FILE}: the model needs sklearn, which is not installed; run: pip install joblib scikit-learn"
    )


def test_any_other_module() -> None:
    text = f"{FILE}: the model needs pandas, which is not installed; run: pip install pandas"
    assert missing("pandas") == missing("pandas.core") == text
    assert isinstance(missing_dependency(FILE, "it", ModuleNotFoundError("no")), MissingDependency)


# --- backends without their library ---


def without(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is not None, reason=f"this environment has {library}")


@pytest.mark.parametrize(
    ("backend", "file", "library", "command"),
    [
        pytest.param(*row, marks=without(row[2]), id=" ".join(row[:2]))
        for row in (
            ("sklearn", "model", "joblib", "pip install joblib scikit-learn"),
            ("xgboost", "model", "xgboost", install("xgboost")),
            ("lightgbm", "model", "lightgbm", install("lightgbm")),
            ("catboost", "model", "catboost", install("catboost")),
            ("torch", "model.pt", "torch", "pip install torch"),
            ("torch", "model.pt2", "torch", "pip install torch"),
            ("tensorflow", "saved_model.pb", "tensorflow", "pip install tensorflow"),
        )
    ],
)
def test_error_of_a_backend(tmp_path: Path, backend: str, file: str, library: str, command: str) -> None:
    path = tmp_path / file
    path.touch()
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            backends.load(backend, path)
        text = f"the {backend} backend needs {library}, which is not installed; run: {command}"
        assert str(caught.value) == f"{path}: {text}"
    assert not [module for module in sys.modules if module.startswith(f"triglot.backends.{backend}")]


INFERER = """
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class Same(ModelInferer):
    def init(self, path, device=None, args=None):
        pass

    def load(self):
        return True

    def infer(self, inp, context):
        return inp


inferer_register.register("same", Same())
"""
ENTRY = {
    "name": "m",
    "version": "1",
    "device": "cpu",
    "inferer_type": "customized",
    "inferer_name": "same",
    "inferer_path": "model",
    "converter_type": "none",
}


@pytest.mark.parametrize("kind", ["inferer_type", "converter_type"])
@pytest.mark.parametrize("library", [pytest.param(name, marks=without(name)) for name in ("torch", "tensorflow")])
def test_error_of_a_grps_project(tmp_path: Path, kind: str, library: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "customized_inferer.py").write_text(INFERER)
    inference = yaml.safe_dump({"models": [ENTRY | {kind: library}], "dag": grps_conf.DAG})
    project = GrpsProject(grps_conf.project(tmp_path, inference=inference), Monitor())
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            project.dag()
        text = f"{kind} {library} needs {library}, which is not installed; run: pip install {library}"
        assert str(caught.value).endswith(text)
    assert not [name for name in sys.modules if name.startswith(f"triglot.backends.grps.{library}")]


# --- tests that need libraries ---

ESTIMATORS = ("test_sklearn*.py", "test_xgboost*.py", "test_lightgbm*.py", "test_catboost*.py")
FILES = {
    "ml": (*ESTIMATORS, "test_any_input.py", "test_freed_modules.py"),
    "torch": ("test_torch_*.py", "test_grps_torch*.py", "test_triton_python_torch.py"),
}
NEEDS_A_COMPILER = {FOLDER / "test_torch_compiled.py"} if shutil.which("g++") is None else set()
"""AOTInductor compiles with it."""


# They have libraries of their own: another environment of these tests changes nothing.
@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(
    "environment", [pytest.param("ml", marks=without("sklearn")), pytest.param("torch", marks=without("torch"))]
)
def test_they_hold_with_the_libraries(environment: str) -> None:
    files = {file for pattern in FILES[environment] for file in FOLDER.glob(pattern)}
    check_tests(environment, *sorted(files - NEEDS_A_COMPILER))
