"""Reads `MLmodel` files and the examples beside them. Knows no library but YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.core.tensor import datatype_name
from triglot.core.types import TensorSpec

PYTHON_FUNCTION = "python_function"
TENSOR = "tensor"
DATATYPES = {
    "boolean": "BOOL",
    "integer": "INT32",
    "long": "INT64",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
    "binary": "BYTES",
    "datetime": "BYTES",
}
"""The datatypes of MLflow's types of columns; any other type is JSON, in BYTES."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column, or a tensor, of a signature: `kind` is MLflow's type of a column, or `TENSOR`.

    `named`: whether MLflow gives it its name; others are numbered. Inputs that are not `required` may be missing.
    """

    name: str
    kind: str
    spec: TensorSpec
    named: bool = True
    required: bool = True


@dataclass(frozen=True, slots=True)
class Description:
    """What an `MLmodel` file says; `inputs`, `outputs` and `params` are empty where the signature has none."""

    file: Path
    flavors: Mapping[str, Mapping[str, Any]]
    inputs: Sequence[Field]
    outputs: Sequence[Field]
    params: Sequence[Mapping[str, Any]]
    mlflow_version: str
    example: Mapping[str, Any]
    from_type_hint: bool = False

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self.file.parent

    @property
    def python_function(self) -> Mapping[str, Any]:
        """The python_function flavor; empty if there is none."""
        return self.flavors.get(PYTHON_FUNCTION, {})

    @property
    def takes_tensors(self) -> bool:
        """Whether the inputs are tensors, not columns of a DataFrame."""
        return any(field.kind == TENSOR for field in self.inputs)


def read(file: Path) -> Description:
    """Return what the file says; keys of other releases are ignored. Raise `ModelLoadError`."""
    try:
        values = _mapping("the file", yaml.safe_load(file.read_bytes()))
        flavors = _mapping("flavors", values.get("flavors"))
        for name, flavor in flavors.items():
            _mapping(f"flavors: {name}", flavor)
        signature = _mapping("signature", values.get("signature") or {})
        return Description(
            file,
            flavors,
            _fields("input", signature),
            _fields("output", signature),
            _listed("params", signature),
            str(values.get("mlflow_version") or ""),
            _example(file.parent, values),
            bool(values.get("is_signature_from_type_hint")),
        )
    except (KeyError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ModelLoadError(f"{file}: {_reason(error)}") from error


def missing_module(description: Description, error: ModuleNotFoundError) -> MissingDependency:
    """Return the error for a model that needs a module, which may be its author's, and no package."""
    return MissingDependency(
        f"{description.file}: the model needs the module {error.name}, which is not installed; its packages are "
        f"listed in {description.folder / 'requirements.txt'}"
    )


def _reason(error: Exception) -> str:
    return f"expected the key {error}" if isinstance(error, KeyError) else str(error)


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{what}: expected a mapping, got {type(value).__name__}")
    return value


def _listed(key: str, signature: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields under a key of a signature, which are JSON in a string."""
    found = json.loads(signature.get(key) or "null")
    if found is None:
        return []
    if not isinstance(found, list):
        raise TypeError(f"signature: {key}: expected a list, got {type(found).__name__}")
    return [_mapping(f"signature: {key}", field) for field in found]


def _fields(kind: str, signature: Mapping[str, Any]) -> list[Field]:
    # MLServer's runtime numbers inputs from 0 and outputs from 1.
    first = 0 if kind == "input" else 1
    fields = [_field(field, f"{kind}-{at}") for at, field in enumerate(_listed(f"{kind}s", signature), first)]
    return [] if [field.kind for field in fields if not field.named] == ["any"] else fields


def _field(field: Mapping[str, Any], number: str) -> Field:
    given = field.get("name")
    name, kind = number if given is None else str(given), str(field["type"])
    shape: Sequence[int] = [-1]
    if kind == TENSOR:
        tensor = _mapping(TENSOR, field["tensor-spec"])
        datatype, shape = _tensor_datatype(name, str(tensor["dtype"])), tensor["shape"]
    else:
        datatype = DATATYPES.get(kind, "BYTES")
    required = bool(field.get("required", True)) and not field.get("optional", False)
    return Field(name, kind, TensorSpec(name, datatype, shape, not required), given is not None, required)


def _tensor_datatype(name: str, dtype: str) -> str:
    try:
        return "BYTES" if dtype in ("str", "bytes", "object") else datatype_name(np.dtype(dtype))
    except TypeError as error:
        raise TypeError(f"signature: {name}: {error}") from None


# --- examples ---


def _example(folder: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of /invocations, or a part of one, that the input example is; empty without one."""
    info = values.get("saved_input_example_info") or {}
    own = info.get("serving_input_path") or info.get("artifact_path")
    if own is None or not (folder / own).is_file():
        return {}
    found = json.loads((folder / own).read_bytes())
    if info.get("pandas_orient") == "split" and "serving_input_path" not in info:
        found = {"dataframe_split": found}
    return found if isinstance(found, dict) else {}
