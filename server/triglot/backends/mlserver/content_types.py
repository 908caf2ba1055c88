"""MLServer's content types: what the elements of a request's tensors stand for, and a response's.

`np`, `pd`, `str` and `datetime` change nothing: models take arrays, and columns by name, and read dates in text.
A content type that is not known is no error, as in MLServer.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from triglot.backends.columns import json_array
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, bytes_elements, object_array

NUMPY, PANDAS, TEXT, BASE64, DATETIME = "np", "pd", "str", "base64", "datetime"
PANDAS_JSON, HUGGING_FACE = "pd_json", "hg_json"
Inputs = Mapping[str, Array]


def content_type_of(parameters: Mapping[str, Any], default: str) -> str:
    """Return the content type in the parameters of a request or a tensor. Raise `InvalidArgument`."""
    value = parameters.get("content_type", default)
    if not isinstance(value, str):
        raise InvalidArgument(f"parameter content_type: expected a string, got {value!r:.60}")
    return value


def decoded(name: str, array: Array, content_type: str) -> Array:
    """Return an input's elements. Raise `InvalidArgument` for elements that are not of the content type."""
    if content_type == HUGGING_FACE:
        raise InvalidArgument(
            f"input '{name}': the content type {HUGGING_FACE} is for pipelines of Hugging Face only"
        )
    decode = _DECODERS.get(content_type)
    if decode is None:
        return array
    if not array.dtype.hasobject:
        raise InvalidArgument(f"input '{name}': expected BYTES with the content type {content_type}, got numbers")
    try:
        return decode(array)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"input '{name}': expected elements of content type {content_type}: {error}"
        ) from None


def _base64(array: Array) -> Array:
    return object_array([_from_base64(element) for element in array.ravel().tolist()], array.shape)


def _from_base64(element: bytes) -> bytes:
    try:
        return base64.b64decode(element, validate=True)
    except binascii.Error:
        return element  # MLServer takes what is no base64 as it is.


def _json(array: Array) -> Array:
    values = [json.loads(element) for element in array.ravel().tolist()]
    if all(isinstance(value, str) for value in values):
        return object_array([value.encode() for value in values], array.shape)
    return json_array(values).reshape(array.shape)


_DECODERS: Mapping[str, Callable[[Array], Array]] = {BASE64: _base64, PANDAS_JSON: _json}


def encoded(name: str, array: Array, content_type: str) -> tuple[Array, str]:
    """Return an output of the content type, and its name: `np` for an array of anything else.

    Raise `InvalidArgument` for an output that cannot be encoded so.
    """
    if content_type not in (TEXT, BASE64, DATETIME):
        return array, NUMPY
    if array.dtype.kind not in "OSUTM":
        raise InvalidArgument(
            f"output '{name}': expected texts for the content type {content_type}, got {array.dtype}"
        )
    if array.dtype.kind == "M":
        array = np.datetime_as_string(array)
    elements = bytes_elements(array)
    if content_type == BASE64:
        elements = [base64.b64encode(element) for element in elements]
    return object_array(list(elements), array.shape), content_type
