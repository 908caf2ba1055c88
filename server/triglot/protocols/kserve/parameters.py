"""Parameters of requests and of their tensors: the reserved keys and their types (spec 2.5, 2.6)."""

from __future__ import annotations

from collections.abc import Mapping

from triglot.core.errors import InvalidArgument
from triglot.core.types import InferenceRequest, OutputOptions, ParameterValue, RegionSlice

TYPED = "typed_contents"
_RESERVED: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "int64_param or string_param (JSON: an integer or a string)"),
    "sequence_start": ((bool,), "bool_param (JSON: true or false)"),
    "sequence_end": ((bool,), "bool_param (JSON: true or false)"),
    "priority": ((int,), "int64_param or uint64_param (JSON: an unsigned integer)"),
    "timeout": ((int,), "int64_param (JSON: an unsigned integer)"),
    "binary_data_output": ((bool,), "bool_param (JSON: true or false)"),
    "triton_enable_empty_final_response": ((bool,), "bool_param (JSON: true or false)"),
    "signature_name": ((str,), "string_param (JSON: a string)"),
    TYPED: ((bool,), "bool_param (JSON: true or false)"),
}
_UNSIGNED = ("priority", "timeout")
REGION = "shared_memory_region"
REGION_SIZE = "shared_memory_byte_size"
REGION_OFFSET = "shared_memory_offset"
CLASSIFICATION = "classification"
BINARY_SIZE = "binary_data_size"
BINARY = "binary_data"
_OF_THE_SERVER = (REGION, REGION_SIZE, REGION_OFFSET, CLASSIFICATION, BINARY_SIZE, BINARY)


def model_parameters_of(parameters: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Return those of a tensor's parameters that the server does not interpret: they are the model's."""
    return {key: value for key, value in parameters.items() if key not in _OF_THE_SERVER}


def set_parameters(request: InferenceRequest, parameters: dict[str, ParameterValue]) -> None:
    """Set a request's parameters, and the signature that Triglot's parameter `signature_name` selects.

    Raise `InvalidArgument` for a reserved key with a value of the wrong type, or an unknown `triton_` key.
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
        # True is an int in Python, but not in the protocol.
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not fits or (key in _UNSIGNED and isinstance(value, int) and value < 0):
            raise InvalidArgument(f"parameter '{key}': expected {expected}, got {value!r}")
    request.parameters = parameters
    request.signature_name = str(parameters.get("signature_name", ""))


def wants_typed(request: InferenceRequest, default: bool) -> bool:
    """Whether gRPC outputs are to be `contents` instead of raw: as Triglot's parameter says, else `default`."""
    return bool(request.parameters.get(TYPED, default))


def region_of(parameters: Mapping[str, ParameterValue], what: str) -> RegionSlice | None:
    """Return the shared-memory slice that a tensor's parameters name, if any; error texts call the tensor `what`.

    Raise `InvalidArgument` for one without a size, and for a value of the wrong type.
    """
    region = parameters.get(REGION)
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidArgument(
            f"parameter '{REGION}' of {what}: expected string_param (JSON: a string), got {region!r}"
        )
    if REGION_SIZE not in parameters:
        raise InvalidArgument(f"parameter '{REGION_SIZE}' of {what}: expected one beside '{REGION}', got none")
    return RegionSlice(
        region, _unsigned(parameters, REGION_OFFSET, what), _unsigned(parameters, REGION_SIZE, what)
    )


def output_options_of(
    parameters: Mapping[str, ParameterValue], what: str, *, least: int = 0
) -> OutputOptions | None:
    """Return the options in a requested output's parameters, if any; `least` is the smallest count of classes.

    Raise `InvalidArgument` as `region_of`.
    """
    region = region_of(parameters, what)
    classes = _unsigned(parameters, CLASSIFICATION, what, least) if CLASSIFICATION in parameters else 0
    if region is None and not classes:
        return None
    if region is not None and classes:
        raise InvalidArgument(f"{what}: '{CLASSIFICATION}' and '{REGION}' are mutually exclusive, got both")
    return OutputOptions(classes, region)


def _unsigned(parameters: Mapping[str, ParameterValue], key: str, what: str, least: int = 0) -> int:
    value = parameters.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(
            f"parameter '{key}' of {what}: expected int64_param of at least {least} (JSON: an unsigned integer), "
            f"got {value!r}"
        )
    return value
