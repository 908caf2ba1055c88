"""Control inputs that the server adds: START, READY, END and the sequence's id, CORRID (spec 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array
from triglot.model.scheduling import ControlInput
from triglot.scheduling.sequences.request import SequenceRequest


class ControlTensors:
    """Makes control inputs of shape [rows,1] for models with a batch dim, and [1] for others."""

    def __init__(self, controls: Iterable[ControlInput], *, batched: bool) -> None:
        self._controls = tuple(controls)
        self._batched = batched

    @property
    def takes_texts(self) -> bool:
        """Whether sequence ids are strings, as the model's CORRID input is of type BYTES."""
        return any(control.kind == "CORRID" and control.datatype == "BYTES" for control in self._controls)

    def check(self, sequence_id: int | str) -> None:
        """Raise `InvalidArgument` for a sequence id that the model's CORRID input cannot hold."""
        for control in self._controls:
            if control.kind == "CORRID" and not _fits(sequence_id, control.datatype):
                kind = "a string" if control.datatype == "BYTES" else f"an integer of type {control.datatype}"
                raise InvalidArgument(
                    f"sequence id {sequence_id!r}: expected {kind}, the type of the model's input '{control.name}'"
                )

    def inputs(self, rows: Sequence[SequenceRequest | None]) -> dict[str, Array]:
        """Return the control inputs of these rows; None is a row without a request."""
        made = {}
        for control in self._controls:
            values = [_value(control, row) for row in rows]
            array = np.array(values, DATATYPES[control.datatype].dtype)
            made[control.name] = array.reshape(-1, 1) if self._batched else array
        return made

    def of_one_request(self, rows: int) -> dict[str, Array]:
        """Return the control inputs of `rows` sequences of one request each."""
        made = {}
        for control in self._controls:
            text = control.datatype == "BYTES"
            ids: list[Any] = [str(number).encode() if text else number for number in range(1, rows + 1)]
            values = ids if control.kind == "CORRID" else [control.true] * rows
            array = np.array(values, DATATYPES[control.datatype].dtype)
            made[control.name] = array.reshape(-1, 1) if self._batched else array
        return made


def _fits(sequence_id: int | str, datatype: str) -> bool:
    if datatype == "BYTES" or isinstance(sequence_id, str):
        return datatype == "BYTES" and isinstance(sequence_id, str)
    return sequence_id <= int(np.iinfo(DATATYPES[datatype].dtype).max)


def _value(control: ControlInput, row: SequenceRequest | None) -> Any:
    if control.kind == "CORRID":
        if row is None:
            return b"" if control.datatype == "BYTES" else 0
        sequence_id = row.scheduling.sequence_id
        return sequence_id.encode() if isinstance(sequence_id, str) else sequence_id
    if row is None:
        return control.false
    holds = {"START": row.start, "READY": True, "END": row.end}[control.kind]
    return control.true if holds else control.false
