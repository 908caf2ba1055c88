"""Converts a configuration to JSON as Triton writes it (spec 3.7).

protobuf's own JSON has texts for 64-bit numbers, which clients and model code do not expect. So this walks the
message: original field names, zero values included, enums by name, numbers as numbers. Unset fields with presence,
that is messages and members of a oneof, are omitted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, MutableSequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

FLOAT32_DIGITS = (6, 7, 8, 9)


def json_text(message: Message) -> str:
    """Return the message as JSON that `json_format` can parse."""
    return json.dumps(json_object(message), ensure_ascii=False, separators=(",", ":"))


def json_object(message: Message) -> dict[str, Any]:
    """Return the message as values that `json` and `orjson` can serialize."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            fields[field.name] = _entries(field, value)
        elif isinstance(value, MutableSequence):
            fields[field.name] = [_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            fields[field.name] = _value(field, value)
    return fields


def _entries(field: Any, values: Mapping[Any, Any]) -> dict[str, Any]:
    kind = field.message_type.fields_by_name["value"]
    return {str(key): _value(kind, values[key]) for key in sorted(values)}


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return json_object(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return value if named is None else named.name
    if isinstance(value, float):
        return _float(field, value)
    return value


def _float(field: Any, value: float) -> float | str:
    """JSON has no NaN or infinity; texts are how protobuf parses these."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if field.type != FieldDescriptor.TYPE_FLOAT:
        return value
    # A 32-bit value needs fewer digits than its 64-bit representation has.
    for digits in FLOAT32_DIGITS:
        short = float(f"{value:.{digits}g}")
        if _is_same_float32(short, value):
            return short
    return value


def _is_same_float32(first: float, other: float) -> bool:
    try:
        return struct.pack("<f", first) == struct.pack("<f", other)
    except OverflowError:  # Rounding up exceeded the largest value.
        return False
