"""JSON with the extensions of Python's own module, as models that take JSON read and write it. Pure functions."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np

from triglot.core.errors import Internal, InvalidArgument
from triglot.core.fast_json import dumps, loads

log = logging.getLogger(__name__)


def parse(what: str, text: bytes) -> Any:
    """Return the value of a text. Raise `InvalidArgument`, which names `what`."""
    try:
        return loads(text)
    except ValueError:
        pass  # NaN and Infinity need the standard library; so do other errors, for its texts.
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what}: expected JSON: {error}") from None


def serialize(what: str, result: object) -> bytes:
    """Return the text of a value, numpy's included. Raise `Internal`, which names the function `what`."""
    try:
        text = dumps(result, _plain)
        if b"null" not in text:  # It writes null for NaN and Infinity, too.
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
