"""Protobuf by hand: fields one by one, written by other code than the server's."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from triglot.protocols.kserve.codec import SCAN_FROM_BYTES


def number(value: int) -> bytes:
    """A varint; negative numbers in ten bytes, as int64 travels."""
    value &= 2**64 - 1
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def field(tag: int, payload: bytes | str) -> bytes:
    """A length-delimited field."""
    payload = payload.encode() if isinstance(payload, str) else payload
    return number(tag << 3 | 2) + number(len(payload)) + payload


def varint_field(tag: int, value: int) -> bytes:
    return number(tag << 3) + number(value)


def fixed32_field(tag: int, payload: bytes = bytes(4)) -> bytes:
    return number(tag << 3 | 5) + payload


def fixed64_field(tag: int, payload: bytes = bytes(8)) -> bytes:
    return number(tag << 3 | 1) + payload


def group(tag: int, *fields: bytes) -> bytes:
    return number(tag << 3 | 3) + b"".join(fields) + number(tag << 3 | 4)


# A field that nobody knows, just large enough for the path that cuts.
PADDING = field(99, bytes(SCAN_FROM_BYTES))

# Unknown fields of every wire type, groups within groups among them.
_TAGS = st.integers(100, 2**29 - 1)
_SIMPLE = st.one_of(
    st.builds(varint_field, _TAGS, st.integers(0, 2**64 - 1)),
    st.builds(fixed32_field, _TAGS, st.binary(min_size=4, max_size=4)),
    st.builds(fixed64_field, _TAGS, st.binary(min_size=8, max_size=8)),
    st.builds(field, _TAGS, st.binary(max_size=20)),
)
UNKNOWN_FIELDS: st.SearchStrategy[bytes] = st.recursive(
    _SIMPLE,
    lambda inner: st.builds(lambda tag, fields: group(tag, *fields), _TAGS, st.lists(inner, max_size=3)),
    max_leaves=5,
)


def packed(values: Iterable[int]) -> bytes:
    return b"".join(map(number, values))


@st.composite
def damaged(draw: st.DrawFn, data: bytes, most: int = 1) -> bytes:
    """The bytes, changed at one place, or at up to so many."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(made)))
        kind = draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if kind == "insert":
            made[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif kind == "set" and at < len(made):
            made[at] = draw(st.integers(0, 255))
        elif kind == "delete":
            del made[at : at + draw(st.integers(1, 4))]
        elif kind == "cut":
            del made[at:]
    return bytes(made)
