"""The datatypes of grps' tensors (grps 1), shared by the protocol and the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.pb.grps import grps_pb2 as pb


@dataclass(frozen=True, slots=True)
class FlatList:
    """The repeated field of a `GenericTensor` that holds the elements of one DataType.

    `wire` is the dtype of the elements on the wire, `datatype` their KServe datatype.
    """

    dtype: int
    field: str
    number: int
    wire: np.dtype[Any]
    datatype: str

    @property
    def name(self) -> str:
        """The name of the DataType, such as "DT_INT8"."""
        return pb.DataType.Name(self.dtype)


LISTS: dict[int, FlatList] = {
    row.dtype: row
    for row in (
        FlatList(pb.DT_UINT8, "flat_uint8", 4, np.dtype("<u4"), "UINT8"),
        FlatList(pb.DT_INT8, "flat_int8", 5, np.dtype("<i4"), "INT8"),
        FlatList(pb.DT_INT16, "flat_int16", 6, np.dtype("<i4"), "INT16"),
        FlatList(pb.DT_INT32, "flat_int32", 7, np.dtype("<i4"), "INT32"),
        FlatList(pb.DT_INT64, "flat_int64", 8, np.dtype("<i8"), "INT64"),
        FlatList(pb.DT_FLOAT16, "flat_float16", 9, np.dtype("<f4"), "FP16"),
        FlatList(pb.DT_FLOAT32, "flat_float32", 10, np.dtype("<f4"), "FP32"),
        FlatList(pb.DT_FLOAT64, "flat_float64", 11, np.dtype("<f8"), "FP64"),
        FlatList(pb.DT_STRING, "flat_string", 12, np.dtype("O"), "BYTES"),
    )
}
"""By DataType number."""
PACKED_FLOATS = {row.number: row for row in LISTS.values() if row.wire.kind == "f"}
"""By field number, the lists whose packed encoding is the memory layout of the elements."""
WIDER = {"BOOL": "UINT8", "UINT16": "INT32", "UINT32": "INT64", "UINT64": "INT64", "BF16": "FP32"}
"""The datatype that an output is sent as if grps lacks its own."""
