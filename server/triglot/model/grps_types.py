"""The types of grps' tensors (grps 1): what its protocol and its projects both go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.pb.grps import grps_pb2 as pb


@dataclass(frozen=True, slots=True)
class FlatList:
    """The list of a tensor that a DataType chooses.

    `wire` is how its elements travel, `datatype` what they are.
    """

    dtype: int
    field: str
    number: int
    wire: np.dtype[Any]
    datatype: str

    @property
    def name(self) -> str:
        """The DataType's own name, such as "DT_INT8"."""
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
"""By the number of the DataType."""
PACKED_FLOATS = {row.number: row for row in LISTS.values() if row.wire.kind == "f"}
"""By the number of the list, those whose packed form is their elements' own memory."""
WIDER = {"BOOL": "UINT8", "UINT16": "INT32", "UINT32": "INT64", "UINT64": "INT64", "BF16": "FP32"}
"""What an output travels as when grps lacks its datatype."""
