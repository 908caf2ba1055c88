"""The backends of scikit-learn and boosters without their libraries, and their tests with them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from environment_tests import check_tests
from triglot import backends
from triglot.core.errors import MissingDependency
from triglot.parts import install

FOLDER = Path(__file__).parent
LIBRARIES = ("sklearn", "xgboost", "lightgbm", "catboost")
OWN = {file for name in LIBRARIES for file in FOLDER.glob(f"test_{name}*.py")} - {Path(__file__)}
FILES = sorted(OWN | {FOLDER / "test_any_input.py", FOLDER / "test_freed_modules.py"})

without_libraries = pytest.mark.skipif(
    find_spec("sklearn") is not None, reason="this environment has the libraries"
)


@without_libraries
@pytest.mark.parametrize(
    ("backend", "module"),
    [("sklearn", "joblib"), *((name, name) for name in LIBRARIES[1:])],
)
def test_the_error_says_what_to_install(tmp_path: Path, backend: str, module: str) -> None:
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            backends.load(backend, tmp_path / "model")
        text = f"the {backend} backend needs {module}, which is not installed; run: {install(module)}"
        assert str(caught.value) == f"{tmp_path / 'model'}: {text}"
        assert f"triglot.backends.{backend}" not in sys.modules


@without_libraries
# They have libraries of their own: another environment of these tests changes nothing.
@pytest.mark.newest
def test_they_hold_with_the_libraries() -> None:
    check_tests("ml", *FILES)
