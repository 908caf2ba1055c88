"""ONNX models, run by onnxruntime; everything about their tensors is read from the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument as OnnxInvalidArgument

from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.model import Model
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


def load(file: Path) -> Model:
    """The model of `file`. Raises `ModelLoadError` for tensors that the protocol cannot carry."""
    return OnnxModel(file)


class OnnxModel(Model):
    """One onnxruntime session; its dynamic dims, the batch among them, are -1 in the signature."""

    platform = "onnxruntime_onnx"

    def __init__(self, file: Path) -> None:
        self._session: Any = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.inputs = [_spec(file, node) for node in self._session.get_inputs()]
        self.outputs = [_spec(file, node) for node in self._session.get_outputs()]
        self._output_names = [spec.name for spec in self.outputs]

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Runs the session. Raises `InvalidArgument` for inputs that it refuses and text that is not UTF-8."""
        feed = {name: _feedable(name, array) for name, array in inputs.items()}
        try:
            outputs = self._session.run(self._output_names, feed)
        except OnnxInvalidArgument as error:
            raise InvalidArgument(str(error)) from None
        return dict(zip(self._output_names, outputs, strict=True))


def _spec(file: Path, node: Any) -> TensorSpec:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise ModelLoadError(
            f"{file}: tensor '{node.name}' is {node.type}, expected one of {', '.join(_DATATYPES)}"
        )
    # onnxruntime says [] for a scalar and for an unknown rank alike, and checks the rank itself.
    shape = [dim if isinstance(dim, int) else -1 for dim in node.shape] or None
    return TensorSpec(node.name, datatype, shape)


def _feedable(name: str, array: Array) -> Array:
    if array.dtype.kind == "O":
        try:
            text = [element.decode() for element in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"input '{name}': ONNX strings are UTF-8, an element is not: {error}") from None
        return np.array(text, dtype=object).reshape(array.shape)
    # onnxruntime reads the array through typed pointers: it must be aligned.
    return array if array.flags.aligned else array.copy()
