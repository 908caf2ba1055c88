"""JSON by orjson where it is installed; else by the standard library, with orjson's rules.

orjson has no wheels for a new Python at first. Both read the same texts as the same values. In what they write,
only the exponents of numbers look different (1e-7, 1e-07).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from triglot.core.tensor import Array

try:
    import orjson
except ImportError:
    HAS_ORJSON = False
else:
    HAS_ORJSON = True
    _ONLY_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME

Default = Callable[[object], Any]

_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
_HUGE_SHAPES = b"0" * 19, b"e000", b"e+000"
"""Part of every number that is beyond 64 bits, or FP64, once its digits are zeros."""
MAX_DEPTH = 1024
"""Levels that orjson 3.13 reads."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(text: bytes | str) -> Any:
    """Return the value of a text of strict JSON in UTF-8; an integer beyond 64 bits becomes a float.

    Raise `ValueError`, also for NaN, Infinity, numbers beyond FP64, lone surrogates and a byte order mark.
    """
    if HAS_ORJSON:
        return orjson.loads(text)
    if isinstance(text, str):
        text = text.encode()
    shapes = text.translate(_SHAPES)
    decoder = _ROUNDING if any(huge in shapes for huge in _HUGE_SHAPES) else _STRICT
    try:
        check_depth(text)
        value = decoder.decode(text.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError.
    return value


def check_depth(text: bytes) -> None:
    """Raise `RecursionError` for lists and objects that are nested deeper than orjson reads.

    The standard library's own limit depends on the Python: 994 levels in 3.11.2, 1,497 in 3.12.1, 9,998 in 3.13.0,
    65,200 in 3.14.10.
    """
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        brackets = _STRING.sub(b"", text).translate(_STEPS, _NO_BRACKETS)
        if np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int64).max(initial=0) > MAX_DEPTH:
            raise RecursionError("nested too deep")


def dumps(value: object, default: Default | None = None) -> bytes:
    """Return a value as compact JSON, NaN and infinities as null; `default` converts values of other types.

    Raise `TypeError` for a value that has no JSON form.
    """
    if HAS_ORJSON:
        return orjson.dumps(value, default, _ONLY_JSON)
    try:
        _check(value)
    except RecursionError as error:
        raise TypeError(str(error)) from None
    return _encoded(value, default)


def dumps_array(values: Array) -> bytes:
    """Return a numeric, native, C-contiguous array of any shape as nested lists; NaN and infinities as null.

    FP64 has the shortest text that reads back to it; FP32, and FP16 as FP32, too.
    """
    if HAS_ORJSON:
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    if values.dtype.kind == "f" and values.dtype.itemsize < 8:
        values = values.astype(np.float32).astype("S").astype(np.float64)
    return _encoded(values.tolist(), None)


def _check(value: object) -> None:
    """Raise `TypeError` for what the standard library writes, but orjson does not."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys must be strings")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check(item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TypeError("an integer beyond 64 bits")


def _encoded(value: object, default: Default | None) -> bytes:
    try:
        try:
            text = _text(value, default)
        except ValueError:  # NaN or infinities.
            with_tokens = json.dumps(value, default=default)
            text = _text(json.loads(with_tokens, parse_constant=lambda _: None), None)
        return text.encode()
    except (ValueError, RecursionError) as error:
        raise TypeError(str(error)) from None


def _text(value: object, default: Default | None) -> str:
    return json.dumps(value, default=default, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _integer(text: str) -> int | float:
    # Python limits the digits that it converts to an integer.
    value = int(text) if len(text) <= 20 else 2**64
    return value if -(2**63) <= value < 2**64 else _float(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number beyond FP64")
    return value


_STRICT = json.JSONDecoder(parse_constant=_refuse)
_ROUNDING = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer, parse_float=_float)
