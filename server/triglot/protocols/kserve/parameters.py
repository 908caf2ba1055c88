"""Request parameters: the reserved ones and their types (spec 2.5)."""

from __future__ import annotations

from triglot.core.errors import InvalidArgument, NotFound, Unimplemented
from triglot.core.types import InferenceRequest, ParameterValue

_RESERVED: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "int64_param or string_param (JSON: an integer or a string)"),
    "sequence_start": ((bool,), "bool_param (JSON: true or false)"),
    "sequence_end": ((bool,), "bool_param (JSON: true or false)"),
    "priority": ((int,), "int64_param or uint64_param (JSON: an unsigned integer)"),
    "timeout": ((int,), "int64_param (JSON: an unsigned integer)"),
    "binary_data_output": ((bool,), "bool_param (JSON: true or false)"),
    "triton_enable_empty_final_response": ((bool,), "bool_param (JSON: true or false)"),
    "signature_name": ((str,), "string_param (JSON: a string)"),
}
_UNSIGNED = ("priority", "timeout")


def set_parameters(request: InferenceRequest, parameters: dict[str, ParameterValue]) -> None:
    """Give a request its parameters; `signature_name` is a choice of ours among the model's signatures.

    Raises `InvalidArgument` for a reserved key with a value of the wrong type, or an unknown `triton_` key.
    """
    for key, value in parameters.items():
        reserved = _RESERVED.get(key)
        if reserved is None:
            if key.startswith("triton_"):
                raise InvalidArgument(f"parameter '{key}': names that begin with 'triton_' are reserved")
            if key == "headers":
                raise InvalidArgument("parameter 'headers': the name is reserved")
            continue
        types, expected = reserved
        # True is an int to Python, but not to the protocol.
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not fits or (key in _UNSIGNED and isinstance(value, int) and value < 0):
            raise InvalidArgument(f"parameter '{key}': expected {expected}, got {value!r}")
    request.parameters = parameters
    request.signature_name = str(parameters.get("signature_name", ""))


def refuse_shared_memory(region: ParameterValue) -> None:
    """Raises `NotFound`: no region can have been registered."""
    raise NotFound(f"Unable to find shared memory region: '{region}'")


def refuse_classification() -> None:
    """Raises `Unimplemented`."""
    raise Unimplemented("the output parameter 'classification' is not supported")
