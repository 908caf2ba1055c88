"""Scheduling parameters of a request: priority, timeout, sequence (spec 2.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from triglot.core.errors import InvalidArgument

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A request's scheduling parameters (spec 2.5). `timeout` is in seconds, 0: none.

    `sequence_id` 0 or "": the request belongs to no sequence.
    """

    priority: int = 0
    timeout: float = 0.0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


PLAIN = Scheduling()
"""Scheduling of a request without such parameters."""
_MAX_ID = 2**64 - 1
_SCHEDULING = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")
_SERVER_PARAMETERS = frozenset(
    (*_SCHEDULING, "binary_data_output", "triton_enable_empty_final_response", "signature_name", "typed_contents")
)


def scheduling_of(parameters: Mapping[str, object], otherwise: Scheduling = PLAIN) -> Scheduling:
    """Return the scheduling that a request's parameters ask for, or `otherwise` (spec 2.5).

    The parameter `timeout` is in microseconds. Raise `InvalidArgument` for a parameter of the wrong type, or out
    of range.
    """
    if not any(name in parameters for name in _SCHEDULING):
        return otherwise
    return Scheduling(
        priority=_number(parameters, "priority"),
        timeout=_number(parameters, "timeout") / 1e6,
        sequence_id=_sequence_id(parameters.get("sequence_id", 0)),
        sequence_start=_flag(parameters, "sequence_start"),
        sequence_end=_flag(parameters, "sequence_end"),
    )


def own_parameters(parameters: Mapping[str, T]) -> dict[str, T]:
    """Return the parameters that are passed to the model: those that the server does not interpret."""
    return {name: value for name, value in parameters.items() if name not in _SERVER_PARAMETERS}


def _number(parameters: Mapping[str, object], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= _MAX_ID:
        raise InvalidArgument(f"parameter '{name}': expected an integer of at least 0, got {value!r}")
    return value


def _flag(parameters: Mapping[str, object], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise InvalidArgument(f"parameter '{name}': expected true or false, got {value!r}")
    return value


def _sequence_id(value: object) -> int | str:
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:  # A lone surrogate, which JSON can write.
            raise InvalidArgument(f"parameter 'sequence_id': expected UTF-8, got {value!r}") from None
        return value
    if type(value) is not int or not 0 <= value <= _MAX_ID:
        raise InvalidArgument(
            f"parameter 'sequence_id': expected an integer from 0 to 2^64-1 or a string, got {value!r}"
        )
    return value
