"""Triton's datatypes: numbers, names in configurations, and numpy types."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from triglot.core.tensor import DATATYPES, Array, bytes_elements, object_array, pack_bytes

NUMBERS: Mapping[str, int] = MappingProxyType(
    {
        name: number
        for number, name in enumerate(
            [
                "BOOL",
                "UINT8",
                "UINT16",
                "UINT32",
                "UINT64",
                "INT8",
                "INT16",
                "INT32",
                "INT64",
                "FP16",
                "FP32",
                "FP64",
                "BYTES",
                "BF16",
            ],
            1,
        )
    }
)
"""Number of each datatype, as in `TRITONSERVER_datatype`."""
TRITON_TO_NUMPY_TYPE: Mapping[int, type] = MappingProxyType(
    {number: np.bool_ if name == "BOOL" else DATATYPES[name].dtype.type for name, number in NUMBERS.items()}
)
NUMPY_TO_TRITON_TYPE: Mapping[type, int] = MappingProxyType(
    {**{kind: number for number, kind in TRITON_TO_NUMPY_TYPE.items()}, np.bytes_: NUMBERS["BYTES"]}
)
TRITON_STRING_TO_NUMPY: Mapping[str, type] = MappingProxyType(
    {
        "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": TRITON_TO_NUMPY_TYPE[number]
        for name, number in NUMBERS.items()
    }
)


def datatype_of_config(name: object) -> str | None:
    """Return the datatype for TYPE_… in a configuration; None for anything else."""
    datatype = str(name).removeprefix("TYPE_")
    datatype = "BYTES" if datatype == "STRING" else datatype
    return datatype if datatype in NUMBERS and str(name).startswith("TYPE_") else None


def triton_to_numpy_type(data_type: int) -> type:
    """Return the numpy type for a datatype's number. Raise `KeyError`."""
    return TRITON_TO_NUMPY_TYPE[data_type]


def numpy_to_triton_type(data_type: type) -> int:
    """Return the datatype's number for a numpy type. Raise `KeyError`."""
    return NUMPY_TO_TRITON_TYPE[data_type]


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Return the numpy type for TYPE_… in a configuration. Raise `KeyError`."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """Return the raw form of a BYTES tensor, as an array of bytes; None for an array of other elements.

    Empty for an array without elements.
    """
    if input_tensor.size == 0:
        return np.empty([0], dtype=np.object_)
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type != np.bytes_:
        return None
    return np.array(pack_bytes(bytes_elements(input_tensor)), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements of a raw BYTES tensor, flat. Raise `ValueError` for a malformed one."""
    elements, offset, data = [], 0, bytes(encoded_tensor)
    while offset < len(data):
        start = offset + 4
        offset = start + int.from_bytes(data[offset:start], "little")
        if start > len(data) or offset > len(data):
            raise ValueError(f"expected each element after its length (4 bytes), got {len(data)} bytes")
        elements.append(data[start:offset])
    return object_array(elements, [len(elements)])
