"""Tensors of `triglot infer`: converts text of the command line to arrays, and arrays to text."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triglot.config.options import ConfigError
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    TFSERVING_DATATYPES,
    Array,
    bytes_elements,
    datatype_of,
    numbers_of,
    object_array,
)
from triglot.core.types import OutputTensor
from triglot.protocols.kserve.json_elements import elements_of_json, json_of_elements

IN_FULL = 100
"""Limit on the elements of an output that are printed as text; of more, only the first and last few are."""
_WIDER = {"FP16": "FP32", "BF16": "FP32"}
"""Datatypes that JSON lacks, and the datatype whose JSON form is used instead."""


def array_of(text: str, name: str, datatype: str, dims: Sequence[int]) -> Array:
    """Return the input in `name=text` on a command line; `dims` are those of the metadata.

    The text is JSON, or "@FILE" ("@-" is standard input); for BYTES it may be the one element itself. A value with
    fewer dims than the model's gets leading dims of 1. Raise `ConfigError` with the input's name.
    """
    if datatype not in DATATYPES or datatype in TFSERVING_DATATYPES:
        raise ConfigError(f"input '{name}': {datatype} cannot be written on a command line")
    if text.startswith("@"):
        array = _array_of_file(text[1:], name, datatype)
    elif datatype == "BYTES" and not text.startswith("["):
        array = object_array([text.encode()], ())
    else:
        array = _array_of_json(text, name, datatype)
    missing = max(len(dims) - array.ndim, 0)
    return array.reshape((1,) * missing + array.shape)


def _array_of_file(path: str, name: str, datatype: str) -> Array:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"input '{name}': {path}: {error.strerror}") from None
    if data.startswith(b"\x93NUMPY"):
        return _array_of_npy(data, f"input '{name}': {path}", datatype)
    if datatype == "BYTES" and not path.endswith(".json"):
        return object_array([data], ())
    try:
        return _array_of_json(data.decode(), name, datatype)
    except UnicodeDecodeError:
        raise ConfigError(f"input '{name}': {path}: expected JSON or a .npy file for {datatype}") from None


def _array_of_npy(data: bytes, what: str, datatype: str) -> Array:
    try:
        array: Array = np.load(io.BytesIO(data), allow_pickle=False)
        found = datatype_of(array)
    except (ValueError, TypeError, EOFError) as error:
        raise ConfigError(f"{what}: {error}") from None
    if datatype == "BYTES" == found:
        return object_array(bytes_elements(array), array.shape)
    if "BYTES" in (datatype, found) or not np.can_cast(array.dtype, DATATYPES[datatype].dtype, "same_kind"):
        raise ConfigError(f"{what}: expected {datatype}, got {found}")
    return array.astype(DATATYPES[datatype].dtype)


def _array_of_json(text: str, name: str, datatype: str) -> Array:
    try:
        values = json.loads(text)
    except ValueError:
        raise ConfigError(
            f"input '{name}': expected JSON with {datatype} elements, like {_example(datatype)}, or @FILE, got "
            f"{text[:60]!r}"
        ) from None
    shape = _shape_of(values, name)
    what = f"input '{name}'"
    try:
        flat = elements_of_json([values], _WIDER.get(datatype, datatype), shape, what, key="")
    except InvalidArgument as error:
        raise ConfigError(f"{error}; the model takes {datatype}") from None
    return flat.astype(DATATYPES[datatype].dtype).reshape(shape)


def _example(datatype: str) -> str:
    kind = DATATYPES[datatype].dtype.kind
    return {"O": '["a", "b"]', "b": "[true, false]", "i": "[1, 2]", "u": "[1, 2]"}.get(kind, "[1.5, 2]")


def _shape_of(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, list):
        return ()
    shapes = {_shape_of(value, name) for value in values}
    if len(shapes) > 1:
        raise ConfigError(f"input '{name}': expected lists of equal length within a list")
    return (len(values), *(shapes.pop() if shapes else ()))


def json_text(datatype: str, array: Array) -> str:
    """Return the elements as a flat JSON array."""
    if datatype == "BYTES":
        return json.dumps(_texts(array), ensure_ascii=False)
    if datatype in TFSERVING_DATATYPES:
        return json.dumps(list(map(str, numbers_of(array).ravel())))
    wider = _WIDER.get(datatype, datatype)
    pieces = json_of_elements(OutputTensor("", wider, array.astype(DATATYPES[wider].dtype)))
    return b"".join(map(bytes, pieces)).decode()


def plain_text(datatype: str, array: Array) -> str:
    """Return the elements as text for people."""
    if datatype == "BYTES":
        texts = _texts(array)
        more = f", … ({len(texts)} elements)" if len(texts) > IN_FULL else ""
        return ", ".join(json.dumps(text, ensure_ascii=False) for text in texts[:IN_FULL]) + more
    if datatype == "BF16":
        array = array.astype(np.float32)
    return np.array2string(numbers_of(array), separator=", ", threshold=IN_FULL, floatmode="unique")


def _texts(array: Array) -> list[str]:
    return [element.decode(errors="backslashreplace") for element in bytes_elements(array)]
