"""grps' tensors ⇄ the datatypes of models (grps 1). Pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from triglot.core.errors import Internal, InvalidArgument, Unimplemented
from triglot.core.tensor import DATATYPES, Array, bytes_elements, element_count, native, object_array
from triglot.core.types import InputTensor
from triglot.model.grps_types import LISTS, WIDER, FlatList
from triglot.model.signature import shape_text
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.message import GrpsTensor

FLOATS = {row.datatype: row for row in LISTS.values() if row.datatype in ("FP32", "FP64")}
"""By datatype, those whose elements travel as they are."""
DTYPES: dict[str, int] = {row.datatype: row.dtype for row in LISTS.values()}
"""DataType numbers of the datatypes that grps has."""


def dtype_text(dtype: int) -> str:
    """A DataType's name, or what stands for one that nobody knows."""
    return pb.DataType.Name(dtype) if dtype in pb.DataType.values() else f"DataType {dtype}"


def input_tensor(tensor: GrpsTensor, name: str) -> InputTensor:
    """The tensor as input `name`; its data is a flat array, `tensor.elements` itself where nothing has to change.

    Raises `InvalidArgument` when it has no known DataType, not as many elements as its shape says, or an element
    outside of its DataType's range. Halves are rounded to half.
    """
    row = LISTS.get(tensor.dtype)
    if row is None:
        raise InvalidArgument(
            f"tensor '{name}' is {dtype_text(tensor.dtype)}, expected one of {', '.join(map(dtype_text, LISTS))}"
        )
    elements = tensor.elements
    count = element_count(tensor.shape)
    if elements.size != count:
        raise InvalidArgument(
            f"tensor '{name}' of shape {shape_text(tensor.shape)} needs {count} elements, {row.field} has "
            f"{elements.size}"
        )
    return InputTensor(name, row.datatype, tensor.shape, _narrowed(elements, row, name))


def _narrowed(elements: Array, row: FlatList, name: str) -> Array:
    if row.datatype == "BYTES":
        return object_array([utf8(text, f"tensor '{name}'") for text in elements.tolist()], elements.shape)
    dtype = DATATYPES[row.datatype].dtype
    if elements.dtype == dtype:
        return elements
    if row.datatype == "FP16":
        with np.errstate(over="ignore"):
            return elements.astype(dtype)
    bounds = np.iinfo(dtype)
    if elements.size and (elements.min() < bounds.min or elements.max() > bounds.max):
        raise InvalidArgument(
            f"{row.field} of tensor '{name}' has values from {elements.min()} to {elements.max()}, "
            f"the range of {row.name} is {bounds.min} to {bounds.max}"
        )
    return elements.astype(dtype)


def utf8(text: str, what: str) -> bytes:
    """The text's bytes. Raises `InvalidArgument` for one that UTF-8 has no bytes for."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is not Unicode text: {error}") from None


def lossless(array: Array, datatype: str) -> Array | None:
    """The numbers of `array` as `datatype`; None where one would become another, or there is no such way.

    NaN stays NaN, and the two zeros are one.
    """
    dtype = DATATYPES[datatype].dtype
    kind = dtype.kind
    if array.dtype == dtype:
        return array
    if kind in "Oc" or array.dtype.hasobject:
        return None
    if kind == "b":
        return array.astype(dtype) if ((array == 0) | (array == 1)).all() else None
    if kind in "iu":
        return _as_integers(array, dtype)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if array.dtype.kind == "f":
        same = (cast.astype(np.float64) == array) | (array != array)  # noqa: PLR0124
        return cast if same.all() else None
    back = _as_integers(cast.astype(np.float64), array.dtype)
    return cast if back is not None and (back == array).all() else None


def _as_integers(array: Array, dtype: np.dtype[Any]) -> Array | None:
    bounds = np.iinfo(dtype)
    if array.dtype.kind == "f":
        # Beyond these, what a cast gives is the machine's affair. Both are exact as floats, if not as halves.
        array = array.astype(np.float32) if array.dtype.itemsize == 2 else array
        low, beyond = float(bounds.min), float(bounds.max + 1)
        fits = ((array >= low) & (array < beyond) & (array == np.trunc(array))).all()
    else:
        fits = not array.size or (array.min() >= bounds.min and array.max() <= bounds.max)
    return array.astype(dtype) if fits else None


def tensor_of(name: str, datatype: str, array: Array) -> GrpsTensor:
    """An output as a tensor; one of a datatype that grps lacks is widened.

    Raises `InvalidArgument` for BYTES that are not UTF-8, `Internal` for a UINT64 beyond INT64, and
    `Unimplemented` for complex numbers.
    """
    travels = WIDER.get(datatype, datatype)
    dtype = DTYPES.get(travels)
    if dtype is None:
        raise Unimplemented(f"output '{name}' is {datatype}, for which grps has no DataType")
    if travels == "BYTES":
        return GrpsTensor(name, dtype, array.shape, _texts(name, array))
    if datatype == "UINT64" and array.size and array.max() > np.iinfo(np.int64).max:
        raise Internal(
            f"output '{name}' is UINT64 and holds {array.max()}: grps' widest integer, DT_INT64, "
            f"ends at {np.iinfo(np.int64).max}"
        )
    wire = LISTS[dtype].wire
    # Most arrays are what the wire has; asking numpy to make sure of it costs more than to look.
    elements = array if array.dtype is wire else native(array).astype(wire, copy=False)
    return GrpsTensor(name, dtype, array.shape, elements.reshape(-1))


def _texts(name: str, array: Array) -> Array:
    texts = np.empty(array.size, object)
    try:
        texts[:] = [element.decode() for element in bytes_elements(array)]
    except UnicodeError as error:
        raise InvalidArgument(
            f"output '{name}' is not UTF-8 text, which grps tensors require ({error}); send bin_data to receive "
            "bin_data"
        ) from None
    return texts
