"""REST for models that take JSON: instances and predictions are any JSON (tfs 7.2, 7.3). Pure functions."""

from __future__ import annotations

import json
from typing import Any

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import bytes_elements, object_array
from triglot.core.types import InferenceResponse, InputTensor
from triglot.model.signature import INSTANCES
from triglot.protocols.json import text as json_text
from triglot.protocols.json.dialect import type_name
from triglot.protocols.json.limits import DEFAULT_LIMITS, JsonLimits
from triglot.protocols.tfserving.json_dialect import PYTHON

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
