"""Checks of values in Triton's model configuration; each function raises `ValueError` with the key."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from triglot.core.tensor import TFSERVING_DATATYPES
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.scan.paths import inside


def either(names: Iterable[str]) -> str:
    """Return the text for an expected choice."""
    return f"one of {', '.join(names)}"


def not_negative(key: str, number: int) -> int:
    """Return the number if it is at least 0."""
    if number < 0:
        raise ValueError(f"{key}: expected at least 0, got {number}")
    return number


def check_name(key: str, name: str, others: Container[str]) -> None:
    """Check that the name is not empty and not one of the others."""
    if not name:
        raise ValueError(f"{key}: expected a name, got none")
    if name in others:
        raise ValueError(f"{key}: expected different names, got {name!r} twice")


def datatype_of(key: str, number: int) -> str:
    """Return the KServe datatype of a DataType number."""
    if number == pb.TYPE_INVALID:
        raise ValueError(f"{key}: expected {either(pb.DataType.keys()[1:])}, got none")
    return "BYTES" if number == pb.TYPE_STRING else pb.DataType.Name(number).removeprefix("TYPE_")


def data_type_of(datatype: str) -> pb.DataType:
    """Return the DataType of a datatype; `TYPE_INVALID` for those that Triton lacks."""
    if datatype in TFSERVING_DATATYPES:
        return pb.TYPE_INVALID
    number: Any = pb.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")
    return number  # type: ignore[no-any-return]  # The stubs distinguish numbers and enums, protobuf does not.


def reshape_of(key: str, tensor: pb.ModelInput | pb.ModelOutput) -> tuple[int, ...] | None:
    """Return the shape that the model sees of a tensor with these `dims`; None if it is the same."""
    if not tensor.HasField("reshape"):
        return None
    dims, shape = tuple(tensor.dims), tuple(tensor.reshape.shape)
    if not dims:
        raise ValueError(f"{key}.reshape: expected dims beside it, got none")
    if any(dim < 1 and dim != -1 for dim in shape):
        raise ValueError(f"{key}.reshape.shape: expected 1 or more, or -1 for any size, got {list(shape)}")
    if _sizes(dims) != _sizes(shape):
        raise ValueError(
            f"{key}.reshape.shape: expected as many elements before, between and after each -1 as dims "
            f"{list(dims)} have, got {list(shape)}"
        )
    return shape


def _sizes(dims: Iterable[int]) -> list[int]:
    """Return the number of elements before, between and after the variable dims."""
    sizes = [1]
    for dim in dims:
        if dim == -1:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def existing(folder: Path, name: str, key: str) -> Path:
    """Return the file of this name in the folder. Raise `ModelLoadError` for a name that leads out of it."""
    path = inside(folder, name, key)
    try:
        found = path.is_file()
    except OSError:  # For example a name that is too long for a file.
        found = False
    if not found:
        raise ValueError(f"{key}: expected a file in {folder}, got {name!r}")
    return path
