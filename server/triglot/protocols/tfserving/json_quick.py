"""Fast reader for `:predict` bodies that are plain and regular. Pure functions.

Strategy: fast parsers find the numbers, and the text's own brackets prove that the lists are regular. The
*skeleton* of a body is what is left without all bytes but brackets, braces, commas, colons and quotes. As long as
there are no backslashes, which this reader rejects, it shows the body's structure; and the skeleton of regular
tensors follows from their shapes. So that is built, and compared: a ragged list, or a repeated key, makes a
difference. simdjson rejects repeated keys itself, so for a few long lists it is enough to check their lengths, and
to count the opening brackets in the text: one more, and they hold something that is not a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.errors import ServingError
from triglot.core.tensor import DATATYPES, Array
from triglot.core.types import InputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.protocols.json.arrays import LargeArray, all_but, count, parse_large, skeleton_of
from triglot.protocols.json.limits import JsonLimits
from triglot.protocols.json.text import LARGE_FROM_BYTES, flatten, parse_plain
from triglot.protocols.tfserving.json_tensors import RULES, PredictBody, narrowed, to_array
from triglot.protocols.tfserving.json_values import decode_base64
from triglot.protocols.tfserving.tensor import MAX_DIMS

_NOT_STRUCTURE = all_but(b'[]{},:"')
_BASE64_TEXT = b'{"":""}'
TEXT_PER_LIST = 64
"""Cost of checking a list, in bytes of skeleton."""


def read_quickly(body: bytes, signature_of: Callable[[str], Signature], limits: JsonLimits) -> PredictBody | None:
    """Returns the request of a body; None for one that needs the exact reader."""
    if b"\\" in body:
        return None
    parsers: list[Callable[[bytes, JsonLimits], Any]] = [parse_plain]
    if len(body) >= LARGE_FROM_BYTES:
        parsers.insert(0, _with_arrays)
    for parse in parsers:
        try:
            return _read(parse(body, limits), body, signature_of)
        except (ValueError, TypeError, RuntimeError, ServingError):
            continue  # Errors of `signature_of` as well: the exact reader calls it again in its order.
    return None


def _with_arrays(body: bytes, limits: JsonLimits) -> Any:
    return parse_large(body, limits)[0]


class _Irregular(ValueError):
    """The body needs the exact reader."""


@dataclass(slots=True)
class _Elements:
    """Elements of an array with its shape by the first list of each level; not yet proven to be regular.

    `texts` are the skeletons of the elements, if they have any.
    """

    shape: tuple[int, ...]
    data: Array
    texts: list[bytes] | None = None

    def tensor(self, spec: TensorSpec) -> InputTensor:
        return InputTensor(spec.name, spec.datatype, self.shape, self.data)


def _read(values: Any, body: bytes, signature_of: Callable[[str], Signature]) -> PredictBody:
    """Returns the request. Raises `_Irregular`, and as the parsers for values that are not numbers."""
    if not isinstance(values, dict):
        raise _Irregular
    row = "instances" in values
    key = "instances" if row else "inputs"
    name = values.get("signature_name")
    name = "" if name is None else name
    if key not in values or (row and "inputs" in values) or not isinstance(name, str):
        raise _Irregular
    signature = signature_of(name)
    specs = signature.inputs
    if not specs or signature.takes_json:
        raise _Irregular
    lists = _lists(values, len(body) // TEXT_PER_LIST)
    is_proven = lists is not None and lists == count(b"[", body)
    skeleton = b"" if is_proven else skeleton_of(_NOT_STRUCTURE, body)
    tensors, text = _Reader(None if is_proven else len(skeleton), specs).read(values[key], row)
    if _object_text(values, {key: text}) != skeleton and not is_proven:
        raise _Irregular
    rows = values[key]
    return PredictBody(name, row, tensors, row and isinstance(rows, list) and _names_inputs(rows[0]))


def _lists(value: Any, most: int) -> int | None:
    """Returns how many lists simdjson's values have, all of them regular.

    None if that takes a skeleton to prove.
    """
    if isinstance(value, LargeArray):
        return value.lists(most)
    if not isinstance(value, dict):
        return None if isinstance(value, list) else 0
    counts = [_lists(member, most) for member in value.values()]
    # Without a large array the values may be `parse_plain`'s, which drops repeated keys.
    return None if None in counts else sum(filter(None, counts)) or None


class _Reader:
    """Reads the tensors of one body, and builds the skeleton that they must have.

    `_room` is what is left of the size of the body's own skeleton: no shape that is derived from the first of
    ragged lists may exceed it. None: the lists are known to be regular, and no skeleton is built.
    """

    def __init__(self, room: int | None, specs: Sequence[TensorSpec]) -> None:
        self._room = room
        self._specs = specs

    def read(self, value: Any, row: bool) -> tuple[list[InputTensor], bytes]:
        """Returns the tensors under `instances` (`row`) or `inputs`, and their skeleton."""
        if not row and _names_inputs(value):
            return self._named(value)
        if row and isinstance(value, list) and value and _names_inputs(value[0]):
            return self._rows(value)
        if len(self._specs) != 1:
            raise _Irregular
        elements = _elements(value, self._specs[0].datatype)
        if row and (not elements.shape or not elements.shape[0]):
            raise _Irregular
        return [elements.tensor(self._specs[0])], self._texts(elements)[0]

    def _named(self, value: dict[str, Any]) -> tuple[list[InputTensor], bytes]:
        if not all(spec.name in value for spec in self._specs):
            raise _Irregular
        columns = {spec.name: _elements(value[spec.name], spec.datatype) for spec in self._specs}
        texts = {name: self._texts(elements)[0] for name, elements in columns.items()}
        return [columns[spec.name].tensor(spec) for spec in self._specs], _object_text(value, texts)

    def _rows(self, rows: list[Any]) -> tuple[list[InputTensor], bytes]:
        keys = list(rows[0])
        # Objects with only a member `b64` may be strings.
        if set(keys) != {spec.name for spec in self._specs} or keys == ["b64"]:
            raise _Irregular
        if any(type(row) is not dict or list(row) != keys for row in rows):
            raise _Irregular
        columns = {spec.name: _elements([row[spec.name] for row in rows], spec.datatype) for spec in self._specs}
        texts = zip(*[self._texts(columns[key], skip=1) for key in keys], strict=True)
        heads = [_head(key) for key in keys]
        items = [_members_text(heads, row) for row in texts]
        return [columns[spec.name].tensor(spec) for spec in self._specs], _list_text(items)

    def _texts(self, elements: _Elements, skip: int = 0) -> list[bytes]:
        """Returns the skeletons of the subarrays behind the first `skip` dims; with 0, that of the whole array."""
        arrays, shape = math.prod(elements.shape[:skip]), elements.shape[skip:]
        if self._room is None:
            return [b""] * arrays
        length = 0
        for size in reversed(shape):
            length = 2 + size * length + max(size - 1, 0)
        self._room -= arrays * length + sum(map(len, elements.texts or ()))
        if self._room < 0:
            raise _Irregular
        if elements.texts is None:
            text = b""
            for size in reversed(shape):
                text = b"[" + (text + b",") * (size - 1) + (text if size else b"") + b"]"
            return [text] * arrays
        texts = elements.texts
        for size in reversed(shape):
            texts = [_list_text(texts[at : at + size]) for at in range(0, len(texts), size)]
        return texts


def _list_text(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _object_text(values: Mapping[str, Any], texts: Mapping[str, bytes]) -> bytes:
    """Returns the skeleton of an object; `texts` has those of its members with structure."""
    items = [texts[key] if key in texts else _scalar_text(value) for key, value in values.items()]
    return _members_text([_head(key) for key in values], items)


def _members_text(heads: Iterable[bytes], texts: Iterable[bytes]) -> bytes:
    return b"{" + b",".join(map(operator.add, heads, texts)) + b"}"


def _head(key: str) -> bytes:
    return _string_text(key) + b":"


def _scalar_text(value: Any) -> bytes:
    if isinstance(value, dict | list | LargeArray):
        raise _Irregular
    return _string_text(value) if isinstance(value, str) else b""


def _string_text(text: str) -> bytes:
    return b'"' + text.encode().translate(None, _NOT_STRUCTURE) + b'"'


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str)


def _names_inputs(value: Any) -> bool:
    return isinstance(value, dict) and not _is_base64(value)


def _elements(value: Any, datatype: str) -> _Elements:
    if datatype not in RULES:
        raise _Irregular
    if isinstance(value, LargeArray):
        numbers = _large_numbers(value, datatype)  # Also determines the shape of a long list.
        elements = _Elements(value.shape, numbers)
    elif isinstance(value, list) and value and isinstance(value[0], LargeArray):
        elements = _stacked(value, datatype)
    else:
        values = flatten(value) if isinstance(value, list) else [value]
        elements = _Elements(_shape(value), *_converted(values, datatype))
    # Without elements no skeleton would prove the shape.
    if len(elements.shape) > MAX_DIMS or elements.data.size != math.prod(elements.shape) or not elements.data.size:
        raise _Irregular
    return elements


def _shape(value: Any) -> tuple[int, ...]:
    dims: list[int] = []
    while isinstance(value, list):
        dims.append(len(value))
        value = value[0] if value else None
    return tuple(dims)


def _stacked(items: list[Any], datatype: str) -> _Elements:
    shapes = {item.shape if isinstance(item, LargeArray) else None for item in items}
    shape = shapes.pop()
    if shapes or shape is None:
        raise _Irregular
    return _Elements((len(items), *shape), np.concatenate([_large_numbers(item, datatype) for item in items]))


def _large_numbers(value: LargeArray, datatype: str) -> Array:
    kind = DATATYPES[datatype].dtype.kind
    if kind == "f":
        return narrowed(value.numbers("d"), datatype)
    if kind not in "iu":
        raise _Irregular
    numbers = value.numbers("u" if datatype == "UINT64" else "i")
    if numbers.size and not RULES[datatype].takes([int(numbers.min()), int(numbers.max())]):
        raise _Irregular
    return narrowed(numbers, datatype)


def _converted(values: list[Any], datatype: str) -> tuple[Array, list[bytes] | None]:
    """Returns the elements and, for strings, their skeletons."""
    if datatype != "BYTES":
        if not RULES[datatype].takes(values):
            raise _Irregular
        return to_array(values, datatype), None
    elements = [_bytes_of(value) for value in values]
    return to_array([element for element, _ in elements], datatype), [text for _, text in elements]


def _bytes_of(value: Any) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return value.encode(), _string_text(value)
    if _is_base64(value):
        return decode_base64(value["b64"].encode()), _BASE64_TEXT
    raise _Irregular
