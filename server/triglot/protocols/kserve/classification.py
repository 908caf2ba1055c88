"""Classification: the highest values of an output in text form (spec 2.7). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, element_count, native, object_array
from triglot.core.types import OutputTensor

MAX_ELEMENTS = 1_000_000
"""Largest output, in elements, that is classified."""


def classify(output: OutputTensor, classes: int, labels: Sequence[bytes], *, batched: bool) -> OutputTensor:
    """Return the `classes` highest values, highest first, each as VALUE:INDEX or VALUE:INDEX:LABEL.

    For a model that batches, those of each row as BYTES [batch, k], else BYTES [k]; k is at most the number of
    elements without the batch dim. Equal values are ordered by index, and NaN comes last.

    Raise `InvalidArgument` for FP16, BF16, BOOL, BYTES and other non-numeric types, and for an output of more
    than `MAX_ELEMENTS`.
    """
    array = output.array
    if array.dtype.kind not in "iuf" or output.datatype == "FP16":
        raise InvalidArgument(
            f"class result not available for output '{output.name}' due to unsupported type '{output.datatype}'"
        )
    if array.size > MAX_ELEMENTS:
        raise InvalidArgument(
            f"class result not available for output '{output.name}': it has {array.size} elements, the limit is "
            f"{MAX_ELEMENTS}"
        )
    shape = array.shape if batched else (1, *array.shape)
    values = native(array).reshape(shape[0], element_count(shape[1:]))
    indices = _highest(values, min(classes, values.shape[1]))
    texts = _texts(np.take_along_axis(values, indices, axis=1), indices, labels)
    return OutputTensor(output.name, "BYTES", object_array(texts, indices.shape if batched else indices.shape[1:]))


def _highest(values: Array, count: int) -> Array:
    """Return the indices of the `count` highest values of each row, highest first."""
    keys = _descending(values)
    if not keys.size or not count:
        return np.empty((len(values), count), np.intp)
    if count < values.shape[1]:
        # All that are before the last one chosen, and of those equal to it the ones with the lowest indices.
        last = np.partition(keys, count - 1, axis=1)[:, count - 1 : count]
        before, equal = keys < last, keys == last
        room = count - before.sum(axis=1, keepdims=True)
        chosen = before | (equal & (equal.cumsum(axis=1) <= room))
        indices = chosen.nonzero()[1].reshape(len(values), count)
    else:
        indices = np.broadcast_to(np.arange(count), values.shape)
    order = np.take_along_axis(keys, indices, axis=1).argsort(axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1)


def _descending(values: Array) -> Array:
    """Return integers in the opposite order of the values; those of NaN are the largest."""
    if values.dtype.kind != "f":
        return ~values
    integer = np.dtype(f"i{values.itemsize}")
    largest = np.iinfo(integer).max
    # IEEE 754: as integers, the bits of positive numbers ascend, those of negative ones descend; -0 becomes 0.
    bits: Array = (values + values.dtype.type(0)).view(integer)
    keys: Array = ~np.where(bits < 0, bits ^ largest, bits)
    keys[np.isnan(values)] = largest
    return keys


def _texts(values: Array, indices: Array, labels: Sequence[bytes]) -> list[bytes]:
    numbers: list[Any] = values.ravel().tolist()
    form = b"%f:%d" if values.dtype.kind == "f" else b"%d:%d"
    texts = []
    for number, index in zip(numbers, indices.ravel().tolist(), strict=True):
        label = labels[index] if index < len(labels) else b""
        texts.append(form % (number, index) + (b":" + label if label else b""))
    return texts
