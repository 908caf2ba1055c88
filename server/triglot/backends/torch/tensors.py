"""Converts between numpy arrays and torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import DATATYPES, Array, datatype_of

_BF16 = DATATYPES["BF16"].dtype
_NAMES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    # Since torch 2.3.
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
    "complex64": "COMPLEX64",
    "complex128": "COMPLEX128",
}
DATATYPE_OF = {getattr(torch, name): datatype for name, datatype in _NAMES.items() if hasattr(torch, name)}
"""torch.dtype → datatype, for the dtypes of the installed torch."""
KNOWN = frozenset(DATATYPE_OF.values())
EXPECTED = f"expected one of {', '.join(DATATYPE_OF.values())}"


def tensor_of(name: str, array: Array) -> torch.Tensor:
    """Return the tensor of an input. Raise `InvalidArgument` for a datatype that torch lacks.

    The tensor is a copy: a program may change its inputs in place, torch has no read-only tensors, and it reads
    them through typed pointers, while a request's own bytes may be unaligned.
    """
    datatype = datatype_of(array)
    if datatype not in KNOWN:
        raise InvalidArgument(f"input '{name}' is {datatype}, which torch does not support; {EXPECTED}")
    copy = array.astype(array.dtype.newbyteorder("="), order="C")
    if datatype == "BF16":
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """Return an output as an array, sharing the tensor's memory if that is the CPU's.

    Raise `Internal` for a tensor that numpy has no arrays for.
    """
    if tensor.dtype not in DATATYPE_OF or tensor.layout is not torch.strided:
        raise Internal(f"output '{name}' is {tensor.dtype} ({tensor.layout}); {EXPECTED} (torch.strided)")
    array: Array
    if tensor.dtype == torch.bfloat16:
        array = tensor.detach().view(torch.int16).numpy(force=True).view(_BF16)
    else:
        array = tensor.numpy(force=True)
    return array
