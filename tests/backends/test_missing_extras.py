"""What the error of a missing library tells to install, and that pyproject.toml has it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from triglot.backends import missing_dependency
from triglot.core.errors import MissingDependency
from triglot.parts import BACKENDS, EXTRAS

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
FILE = Path("models/m/1/model.onnx")
MODULES = {"PyJWT": "jwt", "mlflow-skinny": "mlflow", "nvidia-ml-py": "pynvml", "scikit-learn": "sklearn"}
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


def test_every_module_has_the_extra_that_brings_it() -> None:
    brought = {MODULES.get(name, name): extra for extra, names in requirements().items() for name in names}
    del brought["pysimdjson"]  # Without it, the server reads JSON by another library.
    del brought["pandas"]  # Pickled models of other backends may need it, too.
    assert brought == EXTRAS


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"ensemble", "mlserver", "predictor", "python"}))
def test_the_library_of_a_backend_is_an_extra_of_its_name(backend: str) -> None:
    assert backend in EXTRAS.values()


@pytest.mark.parametrize(("module", "extra"), sorted(EXTRAS.items()))
@pytest.mark.parametrize("below", ["", ".sub.module"])
def test_a_module_of_an_extra(module: str, extra: str, below: str) -> None:
    assert missing(module + below) == (
        f"{FILE}: the model needs {module}, which is not installed; run: pip install 'triglot[{extra}]'"
    )


def test_any_other_module() -> None:
    text = f"{FILE}: the model needs pandas, which is not installed; run: pip install pandas"
    assert missing("pandas") == missing("pandas.core") == text
    assert isinstance(missing_dependency(FILE, "it", ModuleNotFoundError("no")), MissingDependency)
