"""Protobuf wire format: cut out bulky fields, enforce count limits before parsing, encode without copies.

Strategy: tensors never enter a protobuf object. `scan` walks the fields of a message once, returns the bulky ones
as views of the message's bytes, and everything else as a small message for protobuf to parse. It also counts what
an attacker would repeat: a few bytes on the wire can become forty times as many in parsed objects, so the limits
are enforced before protobuf sees a large message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from google.protobuf.message import DecodeError

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import MessageBytes
from triglot.core.varint import varint
from triglot.protocols.rows import MAX_CONTROL_BYTES

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
GROUP_START: Final = 3
GROUP_END: Final = 4
FIXED32: Final = 5
MAX_GROUP_DEPTH: Final = 100
MAX_FIELDS: Final = 32 * 1024
"""Fields that are scanned in one message; a legitimate one has some hundreds."""
SHORT: Final = 5
"""Most bytes of the varint of a tag or a length."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: at most `count` of what `name` says."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class MessageRules:
    """What `scan` does with a message's fields, by field number.

    `cut`: length-delimited fields to cut out. `repeats`: how often a field may occur. `varints`: how many
    numbers a repeated varint field may hold, packed or not. `nested`: rules for the submessage in a field.
    """

    cut: frozenset[int] = frozenset()
    repeats: Mapping[int, Limit] = field(default_factory=dict)
    varints: Mapping[int, Limit] = field(default_factory=dict)
    nested: Mapping[int, MessageRules] = field(default_factory=dict)


def limit_error(limit: Limit) -> InvalidArgument:
    """Return the error for an exceeded limit."""
    return InvalidArgument(f"the request has more than {limit.count} {limit.name}")


def _malformed(what: str, at: int) -> InvalidArgument:
    return InvalidArgument(f"the request is not a valid protobuf message: {what} at byte {at}")


def read_varint(data: bytes | memoryview, at: int, end: int, longest: int = 10) -> tuple[int, int]:
    """Read the varint of at most `longest` bytes at `at`; returns its value and the offset after it.

    Raise `InvalidArgument`.
    """
    value = shift = 0
    for place in range(at, min(end, at + longest)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise _malformed("truncated varint", at)


@mypyc_attr(native_class=False)
class TooManyFields(InvalidArgument):
    """A message has more fields than `scan` allows."""


class _Budget:
    """Counts the fields of a message and its submessages: each costs the same time."""

    __slots__ = ("_most", "left")

    def __init__(self, most: int = MAX_FIELDS) -> None:
        self._most = self.left = most

    def spend(self) -> None:
        """Count one more field. Raise `TooManyFields`."""
        self.left -= 1
        if self.left < 0:
            raise TooManyFields(f"the request has more than {self._most} protobuf fields")


def _skip(data: memoryview, wire_type: int, number: int, at: int, end: int, budget: _Budget) -> int:
    """Return the offset after a field that is not length-delimited. Raise `InvalidArgument`."""
    if wire_type == VARINT:
        after = read_varint(data, at, end)[1]
    elif wire_type == FIXED32:
        after = at + 4
    elif wire_type == FIXED64:
        after = at + 8
    elif wire_type == GROUP_START:
        after = _skip_group(data, number, at, end, budget)
    else:
        raise _malformed(f"wire type {wire_type}", at)
    if after > end:
        raise _malformed("field extends beyond the end", at)
    return after


def _skip_group(data: memoryview, number: int, at: int, end: int, budget: _Budget) -> int:
    open_groups = [number]
    while open_groups:
        budget.spend()
        tag, at = read_varint(data, at, end, SHORT)
        wire_type, inner = tag & 7, tag >> 3
        if wire_type == GROUP_START:
            open_groups.append(inner)
            if len(open_groups) > MAX_GROUP_DEPTH:
                raise _malformed("groups nested too deep", at)
        elif wire_type == GROUP_END:
            if open_groups.pop() != inner:
                raise _malformed("unmatched end of a group", at)
        elif wire_type == LENGTH:
            length, at = read_varint(data, at, end, SHORT)
            at += length
        else:
            at = _skip(data, wire_type, inner, at, end, budget)
        if at > end:
            raise _malformed("group extends beyond the end", at)
    return at


def fields(data: MessageBytes, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, end) for the value of each field of the message between `at` and `end`.

    The message must be valid.
    """
    view = memoryview(data)
    end = len(data) if end is None else end
    budget = _Budget()
    while at < end:
        budget.spend()
        tag, start = read_varint(view, at, end, SHORT)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == LENGTH:
            length, start = read_varint(view, start, end, SHORT)
            at = start + length
        else:
            at = _skip(view, wire_type, number, start, end, budget)
        yield number, wire_type, start, at


def rest_size(data: MessageBytes, cut: int) -> int:
    """Return a message's size without the given length-delimited field. Raise `InvalidArgument`."""
    found = [end - start for number, kind, start, end in fields(data) if number == cut and kind == LENGTH]
    return len(data) - sum(found)


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut field: its number, and the offsets of the field, of its payload, and of its end."""

    number: int
    field_start: int
    start: int
    end: int


def scan(
    data: bytes | memoryview, rules: MessageRules, max_fields: int = MAX_FIELDS
) -> tuple[bytes, list[tuple[int, memoryview]]]:
    """Return the message without its cut fields, and the cut fields' numbers and payloads in order.

    Raise `InvalidArgument` for invalid bytes, or counts beyond the rules' limits, and `TooManyFields`.
    """
    view = memoryview(data)
    cuts: list[Cut] = []
    _scan(view, 0, len(view), rules, cuts, _Budget(max_fields))
    if not cuts:
        return bytes(data), []
    kept: list[memoryview] = []
    at = 0
    for cut in cuts:
        kept.append(view[at : cut.field_start])
        at = cut.end
    kept.append(view[at:])
    return b"".join(kept), [(cut.number, view[cut.start : cut.end]) for cut in cuts]


def _scan(data: memoryview, at: int, end: int, rules: MessageRules, cuts: list[Cut], budget: _Budget) -> None:
    counts: dict[int, int] = {}
    while at < end:
        budget.spend()
        field_start = at
        tag, at = read_varint(data, at, end, SHORT)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise _malformed(f"field number {number}", field_start)
        limit, added = rules.varints.get(number), 1
        if wire_type == LENGTH:
            length, start = read_varint(data, at, end, SHORT)
            at = start + length
            if at > end:
                raise _malformed(f"field {number} extends beyond the end", field_start)
            if number in rules.cut:
                cuts.append(Cut(number, field_start, start, at))
            if number in rules.nested:
                _scan(data, start, at, rules.nested[number], [], budget)
            if limit is None:
                limit = rules.repeats.get(number)
            else:
                added = _count_packed(data[start:at], limit.count)
        else:
            at = _skip(data, wire_type, number, at, end, budget)
        if limit is not None:
            counts[number] = counts.get(number, 0) + added
            if counts[number] > limit.count:
                raise limit_error(limit)


def _count_packed(payload: memoryview, enough: int) -> int:
    # A varint has at most ten bytes, and only its last one is below 0x80.
    return sum(byte < 0x80 for byte in payload[: 10 * (enough + 1)])


def parse(message_class: Any, data: MessageBytes) -> Any:
    """Parse a message. Raise `InvalidArgument`."""
    try:
        return message_class.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is not a valid {message_class.DESCRIPTOR.full_name}: {error}"
        ) from None


def parse_control(message_class: Any, data: MessageBytes) -> Any:
    """Parse a request without tensors, of at most `MAX_CONTROL_BYTES`. Raise `InvalidArgument`."""
    check_control_size(len(data))
    return parse(message_class, data)


def check_control_size(size: int, more: str = "") -> None:
    """Raise `InvalidArgument` for a request without tensors that is too large; `more` completes the text."""
    if size > MAX_CONTROL_BYTES:
        raise InvalidArgument(f"the request has {size} bytes, the limit is {MAX_CONTROL_BYTES}{more}")


def serialize(message: Any) -> bytes:
    """Return a message's bytes."""
    encoded: bytes = message.SerializeToString()
    return encoded


@lru_cache(maxsize=1024)
def length_prefix(number: int, length: int) -> bytes:
    """Return the tag and length that precede `length` bytes of field `number`."""
    return varint(number << 3 | LENGTH) + varint(length)
