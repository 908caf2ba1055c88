"""Which files make a folder a version of a model, and which backend opens them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig

MOST_LISTED = 20
"""Things that a message lists one by one: a request may name any number."""
BACKEND_OF_FILE = {
    "predictor.toml": "predictor",
    "model.py": "python",
    "model.onnx": "onnx",
    "saved_model.pb": "tensorflow",
    "model.pt2": "torch",
    "model.pt": "torch",
    "model.joblib": "sklearn",
    "model.pkl": "sklearn",
    "model.pickle": "sklearn",
    "model.bst": "xgboost",
    "model.ubj": "xgboost",
    "model.json": "xgboost",
    "model-settings.json": "mlserver",
}
"""The files that make a folder a model, the first of them deciding. A pickle may hold a model of scikit-learn or
of XGBoost; its backend looks."""
FILE_IN_FOLDER = {"saved_model.pb": "tensorflow", "model.onnx": "onnx"}
"""Of models that are a folder in place of a file in Triton's layout, the file in it that is opened (spec 5.7)."""
BACKEND_OF_FOLDER = {"model.savedmodel/saved_model.pb": "tensorflow", "model.onnx/model.onnx": "onnx"}
"""The usual ones."""
BACKEND_OF_SUFFIX = {
    Path(name).suffix: backend
    for name, backend in BACKEND_OF_FILE.items()
    if name.startswith("model.") and name != "model.json"
}
"""Of a file with any other name; JSON may be anything."""


def listed(items: Iterable[object]) -> str:
    """As messages list things: the first ones, and how many more there are."""
    texts = list(map(str, items))
    more = len(texts) - MOST_LISTED
    return ", ".join(texts[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def candidates(config: ModelConfig) -> dict[str, str]:
    """The files that make a folder a version, the first of them deciding, and the backend of each; "" for any."""
    files = BACKEND_OF_FILE | BACKEND_OF_FOLDER
    if name := config.file_name:
        files = {name: ""} | {f"{name}/{file}": backend for file, backend in FILE_IN_FOLDER.items()}
    return {file: kind for file, kind in files.items() if "" in (kind, config.backend) or kind == config.backend}


def backend_by_name(file: Path) -> str:
    """The backend for a file of any name; "" where the name does not say."""
    return BACKEND_OF_FILE.get(file.name) or BACKEND_OF_SUFFIX.get(file.suffix, "")


def backend_of(file: Path) -> str:
    """The backend for a file of any name. Raises `ModelLoadError`."""
    backend = backend_by_name(file)
    if not backend:
        raise ModelLoadError(
            f"{file}: expected a folder, one of {listed(BACKEND_OF_FILE)}, or NAME with one of "
            f"{listed(BACKEND_OF_SUFFIX)}"
        )
    return backend
