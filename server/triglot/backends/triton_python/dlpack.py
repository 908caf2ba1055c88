"""DLPack between numpy and the libraries of models.

numpy supports DLPack, but not BF16. So the type in the capsule is changed to integers of the same size on import,
and back on export.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np

from triglot.core.tensor import Array

CPU = 1
_HOST = (CPU, 3, 11)
"""Devices with memory that the CPU can read: its own, and memory that is pinned for a GPU."""
_UINT, _BFLOAT, _BOOL = 1, 4, 6
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    """The first fields of a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
    )


class _Exporter:
    """Return a capsule through the DLPack protocol of array libraries."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def _tensor_in(capsule: object) -> _Tensor:
    """Return the tensor in a capsule. Raise `ValueError` if it is not DLPack's or has been consumed."""
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    return _Tensor.from_address(pointer(capsule, b"dltensor"))


def from_dlpack(value: Any) -> Array:
    """Return an array over the memory of a capsule, an array or a tensor of any library; a copy if on a GPU.

    Raise `TypeError` for anything else, `ValueError` for a capsule that has been consumed.
    """
    capsule = value
    if hasattr(value, "__dlpack__"):
        kind = int(value.__dlpack_device__()[0])
        if kind not in _HOST:
            value = _on_cpu(value)
            if isinstance(value, np.ndarray):
                return value
        capsule = value.__dlpack__()
    elif type(value).__name__ != "PyCapsule":
        raise TypeError(f"from_dlpack: expected a DLPack capsule, or a tensor, got {type(value).__name__}")
    tensor = _tensor_in(capsule)
    if tensor.device.kind not in _HOST:
        torch = sys.modules.get("torch")
        if torch is None:
            raise TypeError("from_dlpack: expected a tensor in the CPU's memory, got a capsule of another device")
        return from_dlpack(torch.from_dlpack(capsule).cpu())
    tensor.device.kind = CPU
    code = tensor.dtype.code
    if code in (_BFLOAT, _BOOL):
        tensor.dtype.code = _UINT
    array: Array = np.from_dlpack(_Exporter(capsule))  # type: ignore[arg-type]  # A capsule has no type that could be named.
    if code == _BFLOAT:
        return array.view(_BFLOAT16)
    return array.view(np.bool_) if code == _BOOL else array


def _on_cpu(value: Any) -> Any:
    """Return the tensor as its library copies it to the CPU: PyTorch, CuPy, or JAX."""
    for name in ("cpu", "get", "__array__"):
        if callable(copy := getattr(value, name, None)):
            return copy()
    raise TypeError(f"from_dlpack: expected a tensor in the CPU's memory, got {type(value).__name__} elsewhere")


def to_dlpack(array: Any) -> object:
    """Return a capsule of a writable array's memory."""
    code = {_BFLOAT16: _BFLOAT, np.dtype(np.bool_): _BOOL}.get(array.dtype)
    if code is None:
        return array.__dlpack__()
    capsule = array.view(np.uint16 if code == _BFLOAT else np.uint8).__dlpack__()
    _tensor_in(capsule).dtype.code = code
    return capsule
