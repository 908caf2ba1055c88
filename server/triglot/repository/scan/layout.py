"""Folder layouts: the files that make a folder a version of a model, and their backends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig

MAX_LISTED = 24
"""Limit on the items that a message lists: a request may name any number."""
BACKEND_OF_FILE = {
    "MLmodel": "mlflow",
    "predictor.toml": "predictor",
    "model.py": "python",
    "model-settings.json": "mlserver",  # It names the model's file, which may stand beside it.
    "model.onnx": "onnx",
    "saved_model.pb": "tensorflow",
    "saved_model.pbtxt": "tensorflow",
    "model.pt2": "torch",
    "model.pt": "torch",
    "model.joblib": "sklearn",
    "model.pkl": "sklearn",
    "model.pickle": "sklearn",
    "model.bst": "xgboost",
    "model.ubj": "xgboost",
    "model.json": "xgboost",
    "model.txt": "lightgbm",
    "model.lgb": "lightgbm",
    "model.cbm": "catboost",
}
"""Files that make a folder a model, by precedence. A pickle may hold a model of several libraries; its backend
finds out."""
FILE_IN_FOLDER = {"saved_model.pb": "tensorflow", "saved_model.pbtxt": "tensorflow", "model.onnx": "onnx"}
"""File to open if the model file of Triton's layout is a folder (spec 5.7)."""
BACKEND_OF_FOLDER = {
    "model.savedmodel/saved_model.pb": "tensorflow",
    "model.savedmodel/saved_model.pbtxt": "tensorflow",
    "model.onnx/model.onnx": "onnx",
}
"""Default paths of such folders."""
BACKEND_OF_SUFFIX = {
    Path(name).suffix: backend
    for name, backend in BACKEND_OF_FILE.items()
    if name.startswith("model.") and name not in ("model.json", "model.txt")
}
"""Backends of other file names by suffix; not for JSON and text, which may be anything."""
KERAS = "save the model with model.export(FOLDER), and serve FOLDER with its saved_model.pb"
CONVERSIONS = {
    ".h5": KERAS,
    ".keras": KERAS,
    ".tflite": "export the model that it was made of with model.export(FOLDER), or convert it with tflite2onnx",
    ".safetensors": "it has weights only; export the model with torch.export.save to a .pt2 file, or to ONNX with "
    "optimum-cli export onnx, or load it in a model.py",
    ".gguf": "load it in a model.py, with llama_cpp",
}
"""What to do with files of formats that no backend reads, by suffix."""


def conversion(folder: Path) -> str:
    """Return what to do with the first file in a folder that no backend reads, to add to an error; "" without."""
    for file in sorted(folder.iterdir()):
        if how := CONVERSIONS.get(file.suffix):
            return f"; {file.name} is not served as it is: {how}"
    return ""


def listed(items: Iterable[object]) -> str:
    """List items for a message: the first ones, and how many more there are."""
    texts = list(map(str, items))
    more = len(texts) - MAX_LISTED
    return ", ".join(texts[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def candidates(config: ModelConfig) -> dict[str, str]:
    """Return the files that make a folder a version, by precedence, with their backends; "" stands for any."""
    files = BACKEND_OF_FILE | BACKEND_OF_FOLDER
    if name := config.file_name:
        files = {name: ""} | {f"{name}/{file}": backend for file, backend in FILE_IN_FOLDER.items()}
    return {file: kind for file, kind in files.items() if "" in (kind, config.backend) or kind == config.backend}


def backend_by_name(file: Path) -> str:
    """Return the backend for a file of any name; "" if the name is not enough."""
    return BACKEND_OF_FILE.get(file.name) or BACKEND_OF_SUFFIX.get(file.suffix, "")


def backend_of(file: Path) -> str:
    """Return the backend for a file of any name. Raise `ModelLoadError`."""
    backend = backend_by_name(file)
    if how := CONVERSIONS.get(file.suffix):
        raise ModelLoadError(f"{file}: it is not served as it is: {how}")
    if not backend:
        raise ModelLoadError(
            f"{file}: expected a folder, one of {listed(BACKEND_OF_FILE)}, or NAME with one of "
            f"{listed(BACKEND_OF_SUFFIX)}"
        )
    return backend
