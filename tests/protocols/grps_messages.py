"""Random messages of grps, whether two are the same, and bodies that are read or refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array
from triglot.model.grps_types import LISTS
from triglot.protocols.grps.json_reader import read_message
from triglot.protocols.grps.message import Data, GrpsMap, GrpsTensor, Message, Status
from triglot.protocols.json.text import LARGE_FROM_BYTES

BLANKS = b" " * LARGE_FROM_BYTES
"""Behind a small body they make it a large one."""


def same_message(message: Message, other: Message) -> bool:
    """Equal, in type and dtype too; NaN is equal to itself."""
    return _comparable(message) == _comparable(other)


def _comparable(message: Message) -> str:
    data: Any = message.data
    if isinstance(data, list):
        data = [(tensor.name, tensor.dtype, tensor.shape, _listed(tensor.elements)) for tensor in data]
    if isinstance(data, GrpsMap):
        data = [sorted(entries.items()) for entries in dataclasses.astuple(data)]
    return repr((message.model, data, message.status))


def _listed(array: Array) -> tuple[str, tuple[int, ...], list[Any]]:
    return array.dtype.str, array.shape, array.tolist()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
DOUBLES = st.floats() | st.sampled_from([0.1, 1e22, 1e16, 5e-324, -0.0])
HALVES = st.floats(width=32) | st.sampled_from([0.1, 3.4028234663852886e38, 16777216.0]).map(
    lambda value: float(np.float32(value))
)
INT32S, INT64S = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "<u4": st.integers(0, 2**32 - 1),
    "<i4": INT32S,
    "<i8": INT64S,
    "<f4": HALVES,
    "<f8": DOUBLES,
    "|O": TEXTS,
}


@st.composite
def tensors(draw: st.DrawFn) -> GrpsTensor:
    """A tensor, whose shape need not fit."""
    name, dtype = draw(TEXTS), draw(st.integers(0, 9) | INT32S)
    shape = draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
    row = LISTS.get(dtype)
    if row is None:
        return GrpsTensor(name, dtype, tuple(shape), np.empty(0, np.float32))
    values = draw(st.lists(_ELEMENTS[row.wire.str], max_size=5))
    elements = np.empty(len(values), row.wire)
    elements[:] = values
    return GrpsTensor(name, dtype, tuple(shape), elements)


def _entries(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(TEXTS, values, max_size=3)


MAPS = st.builds(
    GrpsMap,
    _entries(TEXTS),
    _entries(st.binary(max_size=5)),
    _entries(INT32S),
    _entries(INT64S),
    _entries(HALVES),
    _entries(DOUBLES),
)
JSON_DATA: st.SearchStrategy[Data] = TEXTS | st.lists(tensors(), max_size=3) | MAPS
"""What a JSON body may hold."""
STATUSES = st.none() | st.builds(Status, INT32S, TEXTS, st.integers(0, 2) | INT32S)


def messages(data: st.SearchStrategy[Data]) -> st.SearchStrategy[Message]:
    """Messages with such data."""
    return st.builds(Message, TEXTS, data, STATUSES)


def read(body: Any) -> Message:
    """The message of a body, which is the same for a small and a large one."""
    text = (
        body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    )
    message = read_message(text)
    assert same_message(message, read_message(text + BLANKS))
    return message


def refusal(body: Any) -> str:
    """The text of what is raised for a body, small or large."""
    text = (
        body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    )
    with pytest.raises(InvalidArgument) as small:
        read_message(text)
    with pytest.raises(InvalidArgument):
        read_message(text + BLANKS)
    return small.value.message


def tensor(**members: Any) -> dict[str, Any]:
    """A body with one tensor."""
    return {"gtensors": {"tensors": [members]}}
