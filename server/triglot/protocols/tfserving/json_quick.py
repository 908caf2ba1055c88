"""The quick reader of `:predict` bodies: plain and regular ones only. Pure functions.

Strategy: the quick parsers find the numbers, and the text's own brackets prove that their lists are regular. The
*skeleton* of a body is what is left of it when all bytes but brackets, braces, commas, colons, quotes and
backslashes are dropped. That of regular tensors follows from their shapes, so it is made and compared: a ragged
list, a key that is there twice, a string with one of those bytes in it all make a difference, and then the body is
not read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from triglot.core.errors import ServingError
from triglot.core.signature import Signature
from triglot.core.tensor import DATATYPES, Array
from triglot.core.types import InputTensor, TensorSpec
from triglot.protocols.json_text import SIMD_FROM_BYTES, LargeArray, flatten, parse_large
from triglot.protocols.tfserving.json_tensors import RULES, PredictBody, narrowed, to_array
from triglot.protocols.tfserving.tensor import MAX_DIMS

_FLESH = bytes(set(range(256)) - set(b'[]{},:"\\'))
_STRING = b'""'


def read_quickly(body: bytes, signature_of: Callable[[str], Signature]) -> PredictBody | None:
    """The request of a body; None for one that only the exact reader can judge."""
    parsers: list[Callable[[bytes], Any]] = [orjson.loads]
    if len(body) >= SIMD_FROM_BYTES:
        parsers.insert(0, parse_large)
    for parse in parsers:
        try:
            return _read(parse(body), body, signature_of)
        except (ValueError, TypeError, RuntimeError, ServingError):
            continue  # Also what `signature_of` raises: the exact reader asks again when it is due.
    return None


class _Irregular(ValueError):
    """Not for the quick reader."""


def _read(values: Any, body: bytes, signature_of: Callable[[str], Signature]) -> PredictBody:
    """Raises `_Irregular`, and what the parsers raise for values that are no numbers."""
    if not isinstance(values, dict):
        raise _Irregular
    row = "instances" in values
    key = "instances" if row else "inputs"
    name = values.get("signature_name", "")
    if key not in values or (row and "inputs" in values) or not isinstance(name, str):
        raise _Irregular
    skeleton = body.translate(None, _FLESH)
    tensors, text = _Reader(len(skeleton), signature_of(name).inputs).read(values[key], row)
    texts = {other: text if other == key else _scalar_text(value) for other, value in values.items()}
    if _object_text(texts.values()) != skeleton:
        raise _Irregular
    return PredictBody(name, row, tensors)


class _Reader:
    """Reads the tensors of one body, and makes the skeleton that they must have.

    `_room` is what the body's own has left, so that no shape, made up by the first of ragged lists, outgrows it.
    """

    def __init__(self, room: int, specs: Sequence[TensorSpec]) -> None:
        self._room = room
        self._specs = specs

    def read(self, value: Any, row: bool) -> tuple[list[InputTensor], bytes]:
        """The tensors under `instances` (`row`) or `inputs`, and their skeleton."""
        if isinstance(value, dict) and not row:
            return self._named(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return self._rows(value)
        if len(self._specs) != 1:
            raise _Irregular
        tensor = _tensor(value, self._specs[0])
        if row and (not tensor.shape or not tensor.shape[0]):
            raise _Irregular
        return [tensor], self._text(tensor.shape, tensor.datatype)

    def _named(self, value: dict[str, Any]) -> tuple[list[InputTensor], bytes]:
        tensors = [_tensor(value[spec.name], spec) for spec in self._specs if spec.name in value]
        # An object with one string named b64 is a string.
        if len(tensors) != len(self._specs) or set(value) == {"b64"}:
            raise _Irregular
        texts = {tensor.name: self._text(tensor.shape, tensor.datatype) for tensor in tensors}
        return tensors, _object_text(
            texts[key] if key in texts else _scalar_text(item) for key, item in value.items()
        )

    def _rows(self, rows: list[Any]) -> tuple[list[InputTensor], bytes]:
        keys = list(rows[0])
        if set(keys) != {spec.name for spec in self._specs} or keys == ["b64"]:
            raise _Irregular
        if any(type(row) is not dict or list(row) != keys for row in rows):
            raise _Irregular
        tensors = [_tensor([row[spec.name] for row in rows], spec) for spec in self._specs]
        texts = {tensor.name: self._text(tensor.shape[1:], tensor.datatype, times=len(rows)) for tensor in tensors}
        return tensors, _list_text(_object_text(texts[key] for key in keys), len(rows))

    def _text(self, shape: tuple[int, ...], datatype: str, times: int = 1) -> bytes:
        """The skeleton of an array. `times` is how often the body has one."""
        text = _STRING if datatype == "BYTES" else b""
        length = len(text)
        for size in reversed(shape):
            length = 2 + size * length + max(size - 1, 0)
        self._room -= length * times
        if self._room < 0:
            raise _Irregular
        for size in reversed(shape):
            text = _list_text(text, size)
        return text


def _list_text(item: bytes, size: int) -> bytes:
    return b"[" + (item + b",") * (size - 1) + (item if size else b"") + b"]"


def _object_text(items: Iterable[bytes]) -> bytes:
    return b"{" + b",".join([_STRING + b":" + item for item in items]) + b"}"


def _scalar_text(value: Any) -> bytes:
    if isinstance(value, dict | list | LargeArray):
        raise _Irregular
    return _STRING if isinstance(value, str) else b""


def _tensor(value: Any, spec: TensorSpec) -> InputTensor:
    """The tensor of a value whose lists are as long as the first ones; whether they are all is not known yet."""
    if spec.datatype not in RULES:
        raise _Irregular
    shape = _shape(value)
    if isinstance(value, LargeArray):
        data = _large_elements(value, spec.datatype)
    else:
        data = _elements(flatten(value) if isinstance(value, list) else [value], spec.datatype)
    if len(shape) > MAX_DIMS or data.size != math.prod(shape):
        raise _Irregular
    return InputTensor(spec.name, spec.datatype, shape, data)


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, LargeArray):
        return value.shape
    dims: list[int] = []
    while isinstance(value, list):
        dims.append(len(value))
        value = value[0] if value else None
    return tuple(dims)


def _large_elements(value: LargeArray, datatype: str) -> Array:
    kind = DATATYPES[datatype].dtype.kind
    if kind == "f":
        return narrowed(value.numbers("d"), datatype)
    if kind not in "iu":
        raise _Irregular
    numbers = value.numbers("u" if datatype == "UINT64" else "i")
    rule = RULES[datatype]
    if numbers.size and not rule.takes([int(numbers.min()), int(numbers.max())]):
        raise _Irregular
    return narrowed(numbers, datatype)


def _elements(values: list[Any], datatype: str) -> Array:
    if datatype == "BYTES":
        if not {str}.issuperset(map(type, values)):
            raise _Irregular
        values = [value.encode() for value in values]
    elif not RULES[datatype].takes(values):
        raise _Irregular
    return to_array(values, datatype)
