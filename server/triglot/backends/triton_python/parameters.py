"""Parameters of requests and responses: a dict in the model's code, JSON where it reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from triglot.backends.triton_python.errors import TritonModelException
from triglot.core.types import ParameterValue

NO_PARAMETERS: Mapping[str, ParameterValue] = MappingProxyType({})


def checked(parameters: object, what: str) -> Mapping[str, ParameterValue]:
    """Parameters that a model gives. Raises `TritonModelException` for what no protocol can carry."""
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"{what}: parameters: expected a dict, got {type(parameters).__name__}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"{what}: parameters: expected texts as keys, got {key!r}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"{what}: parameters: {key!r}: expected a bool, an int, a float or a str, "
                f"got {type(value).__name__}"
            )
    return dict(parameters)


def as_json(parameters: Mapping[str, ParameterValue]) -> str:
    """The text that `parameters()` gives."""
    return json.dumps(dict(parameters))
