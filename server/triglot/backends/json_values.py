"""JSON with the extensions of Python's own module, as models that take JSON read and write it. Pure functions."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import orjson

from triglot.core.errors import Internal, InvalidArgument

log = logging.getLogger(__name__)

_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def parse(what: str, text: bytes) -> Any:
    """Returns the value of a text. Raises `InvalidArgument`, which names `what`."""
    try:
        return orjson.loads(text)
    except ValueError:
        pass  # NaN and Infinity need the standard library; so do other errors, for its texts.
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what}: expected JSON: {error}") from None


def serialize(what: str, result: object) -> bytes:
    """Returns the text of a value, numpy's included. Raises `Internal`, which names the function `what`."""
    try:
        text = orjson.dumps(result, default=_plain, option=_ONLY_JSON)
        if b"null" not in text:  # orjson writes null for NaN and Infinity, too.
            return text
    except TypeError:
        pass  # Integers beyond 64 bits and keys that are not strings need the standard library.
    try:
        return json.dumps(result, default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = f"There was a problem processing the outputs: {what} returned a value with no JSON form: {error}"
        log.error("%s", message)
        raise Internal(message) from error


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
