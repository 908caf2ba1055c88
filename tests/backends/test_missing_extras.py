"""What the error of a missing library tells to install, and that pyproject.toml has it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from triglot import parts
from triglot.backends import missing_dependency
from triglot.core.errors import MissingDependency
from triglot.parts import BACKENDS, install

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
