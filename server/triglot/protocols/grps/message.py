"""The content of a GrpsMessage, independent of its encoding (grps 1): protobuf bytes, JSON or tensors.

Errors are its status, with an HTTP-like code (grps 0, 3.4, 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from triglot.core.errors import Code, InvalidArgument, PayloadTooLarge, ServingError
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


_STATUS = {
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


class BadRequest(InvalidArgument):
    """A request that is rejected before its content is decoded (grps 3.3)."""


class NoSuchModel(InvalidArgument):
    """ModelMetadata for a model that does not exist; unlike Predict it answers 404 (grps 3.7)."""


def failure_of(error: ServingError) -> Status:
    """Return the status of an error. Errors in a model's input are 500, as in grps itself."""
    return Status(_code(error), error.message, FAILURE)


def _code(error: ServingError) -> int:
    if isinstance(error, BadRequest):
        return 400
    if isinstance(error, NoSuchModel):
        return 404
    if isinstance(error, PayloadTooLarge):
        return 413
    return _STATUS.get(error.code, 500)
