"""`Tensor`: a named array for the code of Triton Python models."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from triglot.backends.triton_python import dlpack
from triglot.backends.triton_python.datatypes import NUMBERS
from triglot.backends.triton_python.errors import TritonModelException, text
from triglot.core.tensor import Array, bytes_elements, datatype_of, object_array


class Tensor:
    """A name and a numpy array.

    An array of a request or of another model is copied when the model first accesses it: the model may write to
    it, as in Triton, and the original is shared.
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
        """Return a tensor over memory that the model must not write to."""
        tensor = cls(name, array)
        tensor._own = False
        return tensor

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Self:
        """Return a tensor over the memory of a DLPack capsule or of a library's tensor; copy one on a GPU.

        Raise `TritonModelException` for anything else.
        """
        try:
            return cls.of(name, dlpack.from_dlpack(tensor))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise TritonModelException(f"Tensor '{name}': {error}") from error

    def name(self) -> str:
        """Return its name."""
        return self._name

    @property
    def array(self) -> Array:
        """The array, which must not be written to."""
        return self._array

    def as_numpy(self) -> Array:
        """Return the array, always the same one. BYTES are an object array of `bytes`."""
        if not self._own:
            self._array = self._array.copy()
            self._own = True
        return self._array

    def shape(self) -> list[int]:
        """Return its shape."""
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        """Return the number of its datatype. Raise `TritonModelException` for an unsupported dtype."""
        try:
            return NUMBERS[datatype_of(self._array)]
        except (KeyError, TypeError):
            raise TritonModelException(
                f"Tensor '{self._name}': numpy dtype {self._array.dtype} has no datatype"
            ) from None

    def is_cpu(self) -> bool:
        """Return True: all tensors are in CPU memory."""
        return True

    def to_dlpack(self) -> object:
        """Return a DLPack capsule. Raise `TritonModelException` for BYTES, which DLPack lacks."""
        if self._array.dtype.kind in "OSUT":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_dlpack(self.as_numpy())

    def __dlpack__(self, **_: object) -> object:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._array!r})"


def with_bytes(array: Array) -> Array:
    """Return a model's array with texts as `bytes`, as the server's checks require."""
    if array.dtype.kind in "SU":
        return object_array(bytes_elements(array), array.shape)
    return array
