"""Concatenates the inputs of several requests into a batch, and splits its outputs again (spec 5.1, tfs 6.5)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from triglot.core.errors import Internal
from triglot.core.tensor import Array, element_count
from triglot.core.types import Answer
from triglot.model.signature import shape_text

Inputs = Mapping[str, Array]


class NoBatchDim(ValueError):
    """The inputs have no common first dim, the batch dim; the text gives the reason."""


def rows_of(inputs: Inputs) -> int:
    """Return the first dim that all inputs share. Raise `NoBatchDim`."""
    rows = -1
    for array in inputs.values():
        if not array.ndim:
            raise NoBatchDim("input tensors must have at least one dimension")
        if rows not in (-1, array.shape[0]):
            raise NoBatchDim("input tensors must have equal 0th-dimension size")
        rows = array.shape[0]
    if rows < 0:
        raise NoBatchDim("there are no input tensors")
    return rows


def layout_of(inputs: Inputs, *, any_lengths: bool = False) -> Hashable:
    """Return names, dtypes, and all dims but the first: inputs with equal layouts can be joined.

    `any_lengths`: the dims may differ, only their number counts.
    """
    if any_lengths:
        parts: list[Any] = [(name, array.dtype, array.ndim) for name, array in inputs.items()]
    else:
        parts = [(name, array.dtype, array.shape[1:]) for name, array in inputs.items()]
    if len(parts) > 1:
        parts.sort(key=_name_of)
    return tuple(parts)


def _name_of(part: tuple[str, object, object]) -> str:
    return part[0]


class Stack:
    """Arrays of one dtype, to be concatenated along the first dim; `shape` is that of the result.

    They are copied later, by `copy_to`; the time that this takes counts as the model's own. `rows` is at least the
    sum of the arrays' rows: the first row is repeated at the end to fill the rest. Arrays that differ in other
    dims are padded with zeros, or empty strings, up to the largest.
    """

    __slots__ = ("_arrays", "_ragged", "dtype", "shape")

    def __init__(self, arrays: Sequence[Array], rows: int) -> None:
        tails = {array.shape[1:] for array in arrays}
        tail = tails.pop()
        self._ragged = bool(tails)
        if tails:
            tail = tuple(max(dims) for dims in zip(tail, *tails, strict=True))
        self._arrays = arrays
        self.dtype: np.dtype[Any] = arrays[0].dtype
        self.shape = (rows, *tail)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the concatenated array."""
        return element_count(self.shape) * self.dtype.itemsize

    def copy_to(self, target: Array) -> None:
        """Copy the arrays into `target`, an array of this dtype and shape."""
        filled = sum([len(array) for array in self._arrays])
        if self._ragged:
            target[:filled] = nothing(self.dtype)
            at = 0
            for array in self._arrays:
                target[(slice(at, at + len(array)), *map(slice, array.shape[1:]))] = array
                at += len(array)
        else:
            np.concatenate(self._arrays, out=target[:filled])
        if filled < len(target):
            target[filled:] = target[:1]


def nothing(dtype: np.dtype[Any]) -> Any:
    """Return the padding element for a dtype: an empty string or zero."""
    return b"" if dtype.hasobject else np.zeros((), dtype)


def join(members: Sequence[Inputs], rows: int, *, hosted: bool) -> dict[str, Any]:
    """Return the members' inputs, concatenated as by `stacked`."""
    return {name: stacked([inputs[name] for inputs in members], rows, hosted=hosted) for name in members[0]}


def stacked(arrays: Sequence[Array], rows: int, *, hosted: bool) -> Any:
    """Return the concatenated arrays, read-only, each copied once; their `Stack` for a `HostedModel`.

    Sending a stack copies its arrays. Strings are always concatenated: they are packed, and so copied, to be sent.
    `arrays`: of one dtype, shape [rows, …]; dims smaller than the largest are padded.
    """
    stack = Stack(arrays, rows)
    if hosted and stack.dtype.kind not in "OSUT":
        return stack
    target: Array = np.empty(stack.shape, stack.dtype)
    stack.copy_to(target)
    target.flags.writeable = False
    return target


def split(answer: object, counts: Sequence[int], rows: int) -> list[dict[str, Array]]:
    """Return views of a batch's outputs, one dict for each member; `counts` are the members' rows.

    Each has the parameters of `answer`. Raise `Internal`, with a text for the model's author, for outputs whose
    first dim is not `rows`.
    Outputs: any dtype, shape [rows of all members, …].
    """
    if not isinstance(answer, Mapping):
        raise Internal(f"the model returned {type(answer).__name__}, expected a dict of outputs by name")
    parts: list[dict[str, Array]] = [{} for _ in counts]
    if isinstance(answer, Answer):
        parts = [
            Answer({}, answer.parameters, partial=answer.partial, output_parameters=answer.output_parameters)
            for _ in counts
        ]
    for name, value in answer.items():
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        if not array.ndim:
            raise Internal(f"the model returned output '{name}' without a batch dim for a batch of {rows} rows")
        if array.shape[0] != rows:
            raise Internal(
                f"the model returned output '{name}' with shape {shape_text(array.shape)} for a batch of {rows} "
                f"rows, expected {rows} as its first dim"
            )
        at = 0
        for part, count in zip(parts, counts, strict=True):
            part[name] = array[at : at + count]
            at += count
    return parts


def append(answers: Sequence[object]) -> dict[str, Array]:
    """Return the outputs of a request that was executed in parts, concatenated along the first dim.

    Raise `Internal` for parts whose outputs cannot be concatenated.
    """
    parts: list[Mapping[str, Any]] = []
    for answer in answers:
        if not isinstance(answer, Mapping):
            raise Internal(f"the model returned {type(answer).__name__}, expected a dict of outputs by name")
        parts.append(answer)
    if any(part.keys() != parts[0].keys() for part in parts):
        raise Internal("the model returned different outputs for the parts of a request")
    try:
        outputs = {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}
    except (ValueError, TypeError) as error:
        raise Internal(f"cannot join the outputs for the parts of a request: {error}") from None
    described = [part for part in parts if isinstance(part, Answer)]
    if not described:
        return outputs
    parameters = {name: value for part in described for name, value in part.parameters.items()}
    return Answer(outputs, parameters, output_parameters=described[0].output_parameters)
