"""The content of a GrpsMessage, independent of its encoding (grps 1): protobuf bytes, JSON or tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from triglot.core.tensor import Array


@dataclass(slots=True)
class GrpsTensor:
    """One GenericTensor. `dtype` is a number of the enum DataType, known or not.

    `elements` is the flat list of that `dtype`, with the wire's type: uint32 for DT_UINT8, int32 for DT_INT8 to
    DT_INT32, int64, float32 for DT_FLOAT16 and DT_FLOAT32, float64, objects (`str`) for DT_STRING. It is empty
    float32 for an unknown `dtype`. Its length may not match `shape`.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    elements: Array


@dataclass(slots=True)
class GrpsMap:
    """One GenericMapData: its six maps."""

    s_s: dict[str, str] = field(default_factory=dict)
    s_b: dict[str, bytes] = field(default_factory=dict)
    s_i32: dict[str, int] = field(default_factory=dict)
    s_i64: dict[str, int] = field(default_factory=dict)
    s_f: dict[str, float] = field(default_factory=dict)
    s_d: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NDArray:
    """An NDArrayData: over gRPC it is empty (grps 2.4)."""


@dataclass(frozen=True, slots=True)
class Status:
    """A message's status: an HTTP-like code, a text, and UNKNOWN (0), SUCCESS (1) or FAILURE (2)."""

    code: int
    msg: str
    status: int


UNKNOWN, SUCCESS, FAILURE = range(3)
OK = Status(200, "OK", SUCCESS)

Data = str | bytes | list[GrpsTensor] | NDArray | GrpsMap | None
"""str_data, bin_data, gtensors, ndarray, gmap, or none of them."""


@dataclass(slots=True)
class Message:
    """One GrpsMessage. `from_ndarray`: `data` is one tensor that was sent as JSON's `ndarray` (grps 2.4)."""

    model: str = ""
    data: Data = None
    status: Status | None = None
    from_ndarray: bool = False
