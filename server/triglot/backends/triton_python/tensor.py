"""`Tensor`: a named array, as Triton's Python models have them."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from triglot.backends.triton_python import dlpack
from triglot.backends.triton_python.datatypes import NUMBERS
from triglot.backends.triton_python.errors import TritonModelException
from triglot.backends.triton_python.texts import text
from triglot.core.tensor import Array, bytes_elements, datatype_of, object_array


class Tensor:
    """A name and a numpy array.

    What comes from a request or from another model is copied when the model first looks at it: the model may write
    into it, as it may in Triton, and others have the original.
    """

    __slots__ = ("_array", "_name", "_own")

    def __init__(self, name: str | bytes, array: Array) -> None:
        self._name = text(name, "Tensor: name")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{self._name}': expected a numpy array, got {type(array).__name__}")
        self._array = array
        self._own = True

    @classmethod
    def of(cls, name: str, array: Array) -> Self:
        """A tensor over memory that the model must not write to."""
        tensor = cls(name, array)
        tensor._own = False
        return tensor

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Self:
        """A tensor over the memory of a DLPack capsule, or of another library's tensor, on the CPU; one on a GPU
        is copied. Raises `TritonModelException` for anything else."""
        try:
            return cls.of(name, dlpack.from_dlpack(tensor))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise TritonModelException(f"Tensor '{name}': {error}") from error

    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def array(self) -> Array:
        """The array, not to be written to."""
        return self._array

    def as_numpy(self) -> Array:
        """The array; the same one each time. BYTES are an object array of `bytes`."""
        if not self._own:
            self._array = self._array.copy()
            self._own = True
        return self._array

    def shape(self) -> list[int]:
        """Its dims."""
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        """The number of its datatype. Raises `TritonModelException` for an array that no datatype fits."""
        try:
            return NUMBERS[datatype_of(self._array)]
        except (KeyError, TypeError):
            raise TritonModelException(
                f"Tensor '{self._name}': numpy dtype {self._array.dtype} has no datatype"
            ) from None

    def is_cpu(self) -> bool:
        """True: all tensors are in the CPU's memory."""
        return True

    def to_dlpack(self) -> object:
        """A DLPack capsule. Raises `TritonModelException` for BYTES, which DLPack has not."""
        if self._array.dtype.kind in "OSUT":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_dlpack(self.as_numpy())

    def __dlpack__(self, **_: object) -> object:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._array!r})"


def normal(array: Array) -> Array:
    """What a model gave, as the server's checks want it: texts are `bytes`."""
    if array.dtype.kind in "SU":
        return object_array(bytes_elements(array), array.shape)
    return array
