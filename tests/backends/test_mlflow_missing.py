"""MLflow's format without MLflow, and its tests with it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.environment_tests import check_tests
from triglot import backends
from triglot.core.errors import MissingDependency, ModelLoadError

FOLDER = Path(__file__).parent
FUNCTION = {"flavors": {"python_function": {"loader_module": "mlflow.pyfunc.model"}}}
DOUBLE = {"type": "double", "name": "a"}


def load(folder: Path, values: object) -> str:
    file = folder / "MLmodel"
    file.write_text(json.dumps(values))  # JSON is YAML.
    with pytest.raises(ModelLoadError) as caught:
        backends.load("mlflow", file)
    return str(caught.value).removeprefix(f"{file}: ")


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="this environment has the library")
def test_the_error_says_what_to_install(tmp_path: Path) -> None:
    libraries = "mlflow-skinny pandas skops"
    text = f"a model in MLflow's format needs mlflow, which is not installed; run: pip install {libraries}"
    assert load(tmp_path, FUNCTION) == text
    with pytest.raises(MissingDependency):
        backends.load("mlflow", tmp_path / "MLmodel")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "the file: expected a mapping, got list"),
        ({"flavors": 3}, "flavors: expected a mapping, got int"),
        ({"flavors": {"spark": {}}}, "expected the flavor python_function, found spark"),
        (FUNCTION | {"signature": {"inputs": "3"}}, "signature: inputs: expected a list, got int"),
        (FUNCTION | {"signature": {"inputs": '[{"name": "a"}]'}}, "expected the key 'type'"),
        (
            {"flavors": {"catboost": {"data": "../model.cb", "model_type": "CatBoostClassifier"}}},
            "expected the flavor python_function, found catboost",
        ),
    ],
)
def test_invalid_file(tmp_path: Path, values: object, text: str) -> None:
    assert load(tmp_path, values) == text


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="this environment has the library")
# They have libraries of their own: another environment of these tests changes nothing.
@pytest.mark.long
@pytest.mark.newest
def test_they_hold_with_the_libraries() -> None:
    check_tests("mlflow", *sorted(set(FOLDER.glob("test_mlflow*.py")) - {Path(__file__)}))


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="this environment has the library")
@pytest.mark.long
@pytest.mark.newest  # As above.
@pytest.mark.parametrize("environment", ["torch", "tensorflow"])
def test_networks(environment: str) -> None:
    check_tests(environment, FOLDER / "test_networks_of_mlflow.py")
