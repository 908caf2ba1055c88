"""Snapshots of tensors for traces: their first elements (spec 3.11)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from triglot.core.tensor import DATATYPES, Array, Buffer, array_over, numbers_of
from triglot.core.types import InputTensor, OutputTensor

MAX_ELEMENTS = 1024
MAX_TEXT = 16 * 1024
"""Limit on the bytes of a BYTES tensor."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tensor with a copy of its first elements; `elements` of a BYTES tensor are raw bytes or a list."""

    name: str
    datatype: str
    shape: Sequence[int]
    elements: Array | list[Any] | bytes
    is_complete: bool

    def text(self) -> dict[str, str]:
        """Return the tensor as written to the file: all values are texts, as in Triton."""
        elements = self.elements
        if isinstance(elements, bytes):
            words = [_quoted(element) for element in _unpacked(elements)]
        elif isinstance(elements, list):
            words = [_quoted(element) for element in elements]
        else:
            words = [str(int(item) if isinstance(item, bool) else item) for item in elements.tolist()]
        return {
            "name": self.name,
            "data": ",".join(words if self.is_complete else [*words, "..."]),
            "shape": ",".join(map(str, self.shape)),
            "dtype": self.datatype,
        }


def of_input(tensor: InputTensor) -> Snapshot:
    """Return the snapshot of an input as received."""
    if isinstance(tensor.data, Buffer):
        return _of_raw(tensor, tensor.data)
    return _of_array(tensor.name, tensor.datatype, tensor.shape, tensor.data)


def of_output(tensor: OutputTensor) -> Snapshot:
    """Return the snapshot of an output."""
    return _of_array(tensor.name, tensor.datatype, tensor.array.shape, tensor.array)


def _of_raw(tensor: InputTensor, data: Buffer) -> Snapshot:
    row = DATATYPES.get(tensor.datatype)
    if row is None or not row.itemsize:
        head = bytes(memoryview(data)[:MAX_TEXT])
        return Snapshot(tensor.name, tensor.datatype, tensor.shape, head, len(head) == len(data))
    count = len(data) // row.itemsize
    some = min(count, MAX_ELEMENTS)
    copied = array_over(bytes(memoryview(data)[: some * row.itemsize]), row.dtype, (some,))
    return Snapshot(tensor.name, tensor.datatype, tensor.shape, numbers_of(copied), some == count)


def _of_array(name: str, datatype: str, shape: Sequence[int], array: Array) -> Snapshot:
    is_complete = array.size <= MAX_ELEMENTS
    if datatype != "BYTES":
        return Snapshot(name, datatype, shape, numbers_of(array).flat[:MAX_ELEMENTS], is_complete)
    texts: list[Any] = []
    room = MAX_TEXT
    for item in islice(array.flat, MAX_ELEMENTS):
        text = item[:room] if isinstance(item, bytes | str) else str(item)[:room]
        texts.append(text)
        if (room := room - len(text)) <= 0:
            is_complete = False
            break
    return Snapshot(name, datatype, shape, texts, is_complete)


def _unpacked(data: bytes) -> list[bytes]:
    """Return the elements of the start of a raw BYTES tensor, which may be malformed."""
    elements = []
    at = 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        elements.append(data[at + 4 : end])
        at = end
    return elements


def _quoted(element: bytes | str) -> str:
    text = element.decode(errors="replace") if isinstance(element, bytes) else str(element)
    return json.dumps(text, ensure_ascii=False)
