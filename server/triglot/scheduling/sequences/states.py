"""Implicit state: a state output of one request is the state input of the sequence's next request (spec 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from triglot.core.errors import Internal
from triglot.core.tensor import (
    DATATYPES,
    Array,
    BytesFramingError,
    bytes_elements,
    datatype_of,
    element_count,
    object_array,
    unpack_bytes,
)
from triglot.executors.joining import nothing, stacked
from triglot.model.scheduling import InitialState, SequenceState
from triglot.model.signature import shape_text
from triglot.scheduling.sequences.request import SequenceRequest


class StateTensors:
    """The states of a model; with a batch dim, each sequence's state is one row.

    Raise `ValueError` for a file that does not hold a valid initial state.
    """

    def __init__(self, states: Iterable[SequenceState], *, batched: bool) -> None:
        self._states = tuple(states)
        self._batched = batched
        self._initial = {state.input_name: self._shaped(_initial(state)) for state in self._states}
        self._variable = any(dim < 0 for state in self._states for dim in state.dims)

    def __bool__(self) -> bool:
        return bool(self._states)

    def shapes(self, states: Mapping[str, Array]) -> tuple[object, ...]:
        """Return a value that is equal for sequences whose states can share a batch."""
        if not self._variable:
            return ()
        return tuple(states.get(name, initial).shape for name, initial in self._initial.items())

    def inputs(self, rows: Sequence[SequenceRequest | None], *, hosted: bool) -> dict[str, Any]:
        """Return the state inputs of these rows; zeros for rows without a request."""
        if len(rows) == 1 and rows[0] is not None:
            return {**self._initial, **rows[0].run.states}
        made: dict[str, Any] = {}
        for name, initial in self._initial.items():
            present = [None if row is None else row.run.states.get(name, initial) for row in rows]
            made[name] = joined(present, hosted=hosted)
        return made

    def of_one_request(self, rows: int) -> dict[str, Array]:
        """Return the initial states of `rows` sequences."""
        if not self._batched:
            return dict(self._initial)
        return {name: np.repeat(initial, rows, axis=0) for name, initial in self._initial.items()}

    def keep(self, answer: object, rows: Sequence[SequenceRequest | None]) -> None:
        """Store the new state of each row's sequence.

        Raise `Internal`, and stores nothing, for an invalid one.
        """
        if not self._states:
            return
        if not isinstance(answer, Mapping):
            raise Internal(f"the model returned {type(answer).__name__}, expected a dict of outputs by name")
        found = {state.input_name: self._checked(state, answer, len(rows)) for state in self._states}
        for at, row in enumerate(rows):
            if row is not None:
                # Copied: the model may reuse its buffer, and a view of one row would keep the whole batch alive.
                row.run.states = {
                    name: _frozen(array[at : at + 1].copy() if self._batched else array.copy())
                    for name, array in found.items()
                }

    def _checked(self, state: SequenceState, answer: Mapping[str, Any], rows: int) -> Array:
        name = state.output_name
        if name not in answer:
            raise Internal(f"the model returned no state '{name}', only {sorted(map(str, answer))}")
        array = np.asarray(answer[name])
        try:
            datatype = datatype_of(array)
        except TypeError as error:
            raise Internal(f"the model returned state '{name}': {error}") from None
        if datatype != state.datatype:
            raise Internal(f"the model returned state '{name}' as {datatype}, expected {state.datatype}")
        wanted = (rows, *state.dims) if self._batched else tuple(state.dims)
        fits = len(array.shape) == len(wanted) and all(
            expected in (-1, dim) for dim, expected in zip(array.shape, wanted, strict=True)
        )
        if not fits:
            raise Internal(
                f"the model returned state '{name}' with shape {shape_text(array.shape)}, expected "
                f"{shape_text(wanted)}"
            )
        if datatype == "BYTES" and not array.dtype.hasobject:
            # Fixed-length arrays of different lengths could not be joined into a batch.
            return object_array(bytes_elements(array), array.shape)
        return array

    def _shaped(self, array: Array) -> Array:
        return _frozen(array[None] if self._batched else array)


def joined(rows: Sequence[Array | None], *, hosted: bool) -> Any:
    """Return arrays of one row each as `stacked`; zeros, or empty strings, in place of None."""
    first = next(row for row in rows if row is not None)
    none = np.broadcast_to(np.array(nothing(first.dtype), first.dtype), first.shape)
    return stacked([none if row is None else row for row in rows], len(rows), hosted=hosted)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _initial(state: SequenceState) -> Array:
    """Return the initial state without the batch dim."""
    what = f"initial state of {state.input_name!r}"
    datatype = DATATYPES[state.datatype]
    initial = state.initial or InitialState(state.datatype, [max(dim, 1) for dim in state.dims])
    shape = tuple(initial.dims)
    if initial.file is None:
        text = datatype.dtype.hasobject
        return np.full(shape, b"", object) if text else np.zeros(shape, datatype.dtype)
    try:
        data = initial.file.read_bytes()
    except OSError as error:
        raise ValueError(f"{what}: {initial.file}: {error.strerror}") from None
    count = element_count(shape)
    if datatype.dtype.hasobject:
        try:
            return object_array(unpack_bytes(data, count), shape)
        except BytesFramingError as error:
            raise ValueError(f"{what}: {initial.file}: {error.message}") from None
    if len(data) != count * datatype.itemsize:
        raise ValueError(f"{what}: {initial.file}: expected {count * datatype.itemsize} bytes, got {len(data)}")
    return np.frombuffer(data, datatype.dtype).reshape(shape)
