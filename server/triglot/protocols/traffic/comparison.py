"""Compares a shadow's outputs with those of the version that served the call. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triglot.core.tensor import Array, bytes_elements
from triglot.core.types import OutputTensor


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference in an output. `largest`: between two numbers; None if names, types, shapes or texts differ."""

    output: str
    largest: float | None = None


def difference_of(
    expected: Sequence[OutputTensor], got: Sequence[OutputTensor], tolerance: float
) -> Difference | None:
    """Return the first output that differs; None if all are the same.

    Numbers may differ by `tolerance`, absolutely plus relative to those expected; BYTES and BOOL must be equal.
    """
    found = {output.name: output for output in got}
    for output in expected:
        other = found.pop(output.name, None)
        if other is None or (output.datatype, output.array.shape) != (other.datatype, other.array.shape):
            return Difference(output.name)
        if output.datatype == "BYTES":
            if bytes_elements(output.array) != bytes_elements(other.array):
                return Difference(output.name)
        elif (largest := _largest(output.array, other.array, tolerance)) is not None:
            return Difference(output.name, largest)
    return Difference(next(iter(found))) if found else None


def _largest(expected: Array, got: Array, tolerance: float) -> float | None:
    """Return the largest difference of numbers if some are too far apart; infinity, too, as the largest number."""
    if np.array_equal(expected, got):
        return None
    first, other = expected.astype(np.float64), got.astype(np.float64)
    if expected.dtype.kind == "b" or not tolerance:
        differ = ~((first == other) | (np.isnan(first) & np.isnan(other)))
    else:
        differ = ~np.isclose(other, first, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not differ.any():
        return None
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(other[differ] - first[differ])))
    return largest if math.isfinite(largest) else float(np.finfo(np.float64).max)
