"""Parameters of requests and responses: a dict when the model's code sets them, JSON when it reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from triglot.backends.triton_python.errors import TritonModelException
from triglot.core.types import ParameterValue

NO_PARAMETERS: Mapping[str, ParameterValue] = MappingProxyType({})


def checked(parameters: object) -> Mapping[str, ParameterValue]:
    """Return a model's parameters. Raise `TritonModelException` for types that Triton rejects, as floats."""
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
    return dict(parameters)


def as_json(parameters: Mapping[str, ParameterValue]) -> str:
    """Return the parameters as `parameters()` does."""
    return json.dumps(dict(parameters))
