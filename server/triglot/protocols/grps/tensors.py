"""grps' tensors ⇄ arrays of the models' datatypes (grps 1). Pure functions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from triglot.core.errors import Internal, InvalidArgument, Unimplemented
from triglot.core.tensor import DATATYPES, Array, bytes_elements, element_count, native, object_array
from triglot.core.types import InputTensor
from triglot.model.grps_types import LISTS, WIDER, FlatList
from triglot.model.signature import shape_text
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.message import GrpsTensor

FLOATS: Final = {row.datatype: row for row in LISTS.values() if row.datatype in ("FP32", "FP64")}
"""Lists by datatype, for those whose elements are sent as the model has them."""
DTYPES: Final[dict[str, int]] = {row.datatype: row.dtype for row in LISTS.values()}
"""grps' DataType numbers by datatype."""


def dtype_text(dtype: int) -> str:
    """Return a DataType's name, or its number if it is unknown."""
    return pb.DataType.Name(dtype) if dtype in pb.DataType.values() else f"DataType {dtype}"


def input_tensor(tensor: GrpsTensor, name: str) -> InputTensor:
    """Return the tensor as input `name`.

    Its data is a flat array, `tensor.elements` itself if nothing has to change.

    Raise `InvalidArgument` for an unknown DataType, a number of elements that does not match the shape, or an
    element outside the DataType's range. FP16 values are rounded.
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
    """Return the text's bytes. Raise `InvalidArgument` if UTF-8 cannot encode it."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is not Unicode text: {error}") from None


def lossless(array: Array, datatype: str) -> Array | None:
    """Return `array` cast to `datatype`, or None if a value would change, or there is no such cast.

    NaN stays NaN, and 0.0 equals -0.0.
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
        # Beyond the bounds a cast's result depends on the CPU. Both bounds are exact as floats, except as float16.
        array = array.astype(np.float32) if array.dtype.itemsize == 2 else array
        low, beyond = float(bounds.min), float(bounds.max + 1)
        fits = ((array >= low) & (array < beyond) & (array == np.trunc(array))).all()
    else:
        fits = not array.size or (array.min() >= bounds.min and array.max() <= bounds.max)
    return array.astype(dtype) if fits else None


def tensor_of(name: str, datatype: str, array: Array) -> GrpsTensor:
    """Return an output as a tensor; a datatype that grps lacks is widened.

    Raise `InvalidArgument` for BYTES that are not UTF-8, `Internal` for a UINT64 beyond INT64's range, and
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
    # Most arrays already have the wire's dtype; a numpy call to make sure costs more than this comparison.
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
