"""JSON as TensorFlow Serving reads it (tfs 4.3), and as models that take JSON get it (tfs 7.2). Pure functions."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import loads
from triglot.core.tensor import bytes_elements, object_array
from triglot.core.types import InferenceResponse, InputTensor
from triglot.model.signature import INSTANCES
from triglot.protocols.json import text as json_text
from triglot.protocols.json.dialect import (
    DEFAULT_LIMITS,
    HUGE_INTEGER,
    Dialect,
    JsonLimits,
    loads_unique,
    type_name,
)
from triglot.protocols.tfserving.json_printer import debug_text, raw

_BLANKS = " \t\r\n"
_PLACES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|-?Inf(?:inity)?|-NaN', re.DOTALL)
_PYTHONS = {"Inf": "Infinity", "-Inf": "-Infinity", "-NaN": "NaN"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MESSAGES = {
    "Expecting value": "Invalid value.",
    "Illegal trailing comma before end of array": "Invalid value.",
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Illegal trailing comma before end of object": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Invalid control character at": "Invalid escape character in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
}
"""TensorFlow Serving's errors, by those of Python's parser; its offsets may be others."""
_IN_LIST = "Missing a comma or ']' after an array element."
_IN_OBJECT = "Missing a comma or '}' after an object member."
_WITHOUT_DIGITS = {
    ".": "Miss fraction part in number.",
    "e": "Miss exponent in number.",
    "E": "Miss exponent in number.",
}
_TOO_BIG = "Number too big to be stored in double."


class ParseError(ValueError):
    """TensorFlow Serving's message for the text at an offset."""

    def __init__(self, msg: str, before: bytes | None = None) -> None:
        super().__init__(msg if before is None else f"{msg} at offset: {len(before)}")
        self.msg = msg


class _TooBig(ValueError):
    """The text of a number beyond FP64."""


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _TooBig(text)
    return value


def _integer(text: str) -> int | float:
    # Python limits the digits that it converts to an integer.
    value = int(text) if len(text) <= 20 else 2**64
    return value if -(2**63) <= value < 2**64 else _float(text)


def _first_of_equal(members: list[tuple[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in members:
        kept.setdefault(key, value)
    return kept


def _body_or_features(members: list[tuple[str, Any]]) -> dict[str, Any]:
    return _first_of_equal(members) if any(key == "examples" for key, _ in members) else dict(members)


_DECODER = partial(json.JSONDecoder, parse_float=_float, parse_int=_integer)


def _parse(decoder: json.JSONDecoder, text: bytes) -> Any:
    """Return the value at the beginning of a text; bytes that are not UTF-8 become surrogates, see `raw`.

    Raise `ParseError`, and `RecursionError`.
    """
    if not text:
        raise ParseError("The document is empty")
    document = text.decode("utf-8-sig", "surrogateescape")
    start = len(document) - len(document.lstrip(_BLANKS))
    if document[start : start + 1] in {"", *"\0],}:"}:
        raise ParseError("The document is empty.", raw(document[:start]))
    if "Inf" in document or "-NaN" in document:
        document = _TOKENS.sub(lambda token: _PYTHONS.get(token[0], token[0]), document)
    try:
        value = decoder.raw_decode(document, start)[0]
    except json.JSONDecodeError as error:
        raise _parse_error(error) from None
    except _TooBig as error:
        raise ParseError(_TOO_BIG, raw(document[: document.index(str(error))])) from None
    if escape := _SURROGATE.search(text):
        try:
            raw(json.dumps(value, ensure_ascii=False))
        except UnicodeEncodeError:
            raise ParseError("The surrogate pair in string is invalid.", text[: escape.start()]) from None
    return value


def _parse_error(error: json.JSONDecodeError) -> ParseError:
    """Return TensorFlow Serving's error for Python's."""
    at, what = error.pos, error.msg.removesuffix(": ")
    if what in _MESSAGES:
        if what.startswith("Unterminated"):
            at = len(error.doc)
        return ParseError(_MESSAGES[what], raw(error.doc[: at + what.startswith("Illegal")]))
    # A delimiter is missing: here, or after a number that its digits do not follow.
    if error.doc[at - 1 : at].isdigit() and (message := _WITHOUT_DIGITS.get(error.doc[at : at + 1])):
        return ParseError(message, raw(error.doc[: at + 1]))
    opened = []
    for place in _PLACES.findall(error.doc, 0, at):
        if place in ("[", "{"):
            opened.append(place)
        elif place in ("]", "}"):
            opened.pop()
    return ParseError(_IN_LIST if opened[-1] == "[" else _IN_OBJECT, raw(error.doc[:at]))


def _loads_exactly(text: bytes) -> Any:
    if HUGE_INTEGER.search(text):
        raise ValueError("perhaps an integer beyond 64 bits")
    return loads(text)


def _parse_exactly(text: bytes) -> Any:
    return json.JSONDecoder().raw_decode(text.decode("utf-8-sig").lstrip(_BLANKS))[0]


TFSERVING = Dialect(
    "JSON Parse error",
    loads_unique,
    partial(_parse, _DECODER(object_pairs_hook=_first_of_equal)),
    lambda value: f"JSON Value: {debug_text(value)} Is not object",
    keeps_first=True,
    ignores_rest=True,
    quotes_values=True,
)
EXAMPLES = replace(
    TFSERVING, parse=partial(_parse, _DECODER(object_pairs_hook=_body_or_features)), keeps_first=False
)
"""Bodies of `:classify` and `:regress`: of equal features the last one counts."""
PYTHON = Dialect(
    "the body is not valid JSON",
    _loads_exactly,
    _parse_exactly,
    lambda value: f"expected a JSON object with '{INSTANCES}', got {type_name(value)}",
    ignores_rest=True,
)
"""Bodies for Python code that takes JSON: integers are exact."""


PARAMETERS, SIGNATURE_NAME = "parameters", "signature_name"


def read_object(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Return the JSON object of a body.

    NaN and Infinity are numbers, and text after the object is ignored (tfs 4.3).

    Raise `InvalidArgument`, and `PayloadTooLarge` for a body beyond `limits`.
    """
    return json_text.read_object(body, limits, PYTHON)


def instances_of(values: dict[str, Any]) -> list[Any]:
    """Return the instances of a request. Raise `InvalidArgument`."""
    instances = values.get(INSTANCES)
    if not isinstance(instances, list):
        got = type_name(instances) if INSTANCES in values else "nothing"
        raise InvalidArgument(f"expected '{INSTANCES}' to be a list, got {got}")
    return instances


def split_keywords(values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the instances, and the members beside them as keyword arguments. Raise `InvalidArgument`."""
    keywords = {key: value for key, value in values.items() if key not in (INSTANCES, SIGNATURE_NAME)}
    return instances_of(values), keywords


def json_inputs(instances: list[Any], keywords: dict[str, Any]) -> list[InputTensor]:
    """Return the inputs of a model that takes JSON: a string for each instance, one for the keyword arguments."""
    return [instances_input(instances), _texts(PARAMETERS, [keywords])]


def instances_input(instances: list[Any]) -> InputTensor:
    """Return the input with the JSON of each instance."""
    return _texts(INSTANCES, instances)


def _texts(name: str, values: list[Any]) -> InputTensor:
    shape = (len(values),)
    texts = [json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass") for value in values]
    return InputTensor(name, "BYTES", shape, object_array(texts, shape))


def encode_json(response: InferenceResponse) -> bytes:
    """Return `{"predictions": …}` with the model's JSON, unchanged."""
    return b'{"predictions": %b}' % b"".join(bytes_elements(response.outputs[0].array))
