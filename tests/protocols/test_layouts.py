"""What is remembered of small messages, and how much: messages here are a name, and a value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import PADDING, UNKNOWN_FIELDS, field, fixed32_field, group, varint_field
from triglot.core.tensor import MessageBytes
from triglot.protocols.layouts import (
    LAYOUT_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_LAYOUTS_BYTES,
    LayoutDecoder,
    Make,
    Rules,
    split,
)

MAX_LAYOUTS = MAX_LAYOUTS_BYTES // (LAYOUT_BYTES + len(b"..model_000000.."))
"""Of the messages below."""

Named = tuple[bytes, bytes]
VALUE = 7 << 3 | 2
RULES: Rules = {VALUE: None}


class Decoder:
    """The decoder, and the messages that it did not know."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self._decoder = LayoutDecoder(self._decode, RULES, self._learn, small=8 * MAX_LAYOUT_BYTES)

    def _decode(self, data: MessageBytes) -> Named:
        data = bytes(data)
        self.parsed.append(data)
        parts = split(data, RULES)
        assert parts is not None
        return data[2 : 2 + data[1]], parts[1][0]

    def _learn(self, _: bytes, named: Named) -> Make[Named]:
        return lambda values: (named[0], values[0])

    def check(self, name: bytes, value: bytes, more: bytes = b"") -> None:
        """It means what it says."""
        assert self._decoder(field(1, name) + field(7, value) + more) == (name, value)


def test_values_do_not_count() -> None:
    decoder = Decoder()
    for number in range(100):
        decoder.check(b"m", b"%03d" % number)
    assert len(decoder.parsed) == 1


def test_clients_of_many_models_take_turns() -> None:
    decoder = Decoder()
    for value in (b"1", b"2", b"3"):
        for kind in range(MAX_LAYOUTS):
            decoder.check(b"model_%06d" % kind, value)
    assert len(decoder.parsed) == MAX_LAYOUTS


def test_oldest_layout_is_evicted() -> None:
    decoder = Decoder()
    for kind in range(MAX_LAYOUTS + 1):
        decoder.check(b"model_%06d" % kind, b"1")
    decoder.check(b"model_%06d" % MAX_LAYOUTS, b"2")
    decoder.check(b"model_000001", b"2")
    assert len(decoder.parsed) == MAX_LAYOUTS + 1
    decoder.check(b"model_000000", b"2")
    assert len(decoder.parsed) == MAX_LAYOUTS + 2


def test_a_long_layout_is_not_kept() -> None:
    decoder = Decoder()
    for _ in range(2):
        assert decoder._decoder(field(1, b"m") + field(7, b"1") + field(9, bytes(MAX_LAYOUT_BYTES))) == (
            b"m",
            b"1",
        )
    assert len(decoder.parsed) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05ab",
        b"\x3a\x80",
        b"\x3a\x80\x80\x80\x80\x01",
        b"\x08\x80",
        fixed32_field(3, bytes(4)),
        group(3, b""),
        varint_field(99, 1),
    ],
)
def test_what_is_damaged_or_unusual_is_not_split(data: bytes) -> None:
    assert split(field(1, "m") + data, RULES) is None


def test_long_values() -> None:
    for size in (127, 128, 16383, 16384, 70000):
        value = bytes(size)
        assert split(field(1, "m") + field(7, value) + field(2, "n"), RULES) is not None
        key, values = split(field(1, "m") + field(7, value) + field(2, "n"), RULES) or (b"", [])
        assert values == [value]
        assert key.startswith(field(1, "m"))
        assert key.endswith(field(2, "n"))


@given(
    st.lists(
        st.sampled_from([field(1, "m"), varint_field(2, 300), PADDING])
        | st.binary(max_size=300).map(lambda value: field(7, value))
        | st.binary(max_size=200).map(lambda value: field(5, field(7, value))),
        max_size=6,
    ),
    UNKNOWN_FIELDS,
)
def test_a_message_is_what_is_kept_with_the_values_in_their_places(parts: list[bytes], unknown: bytes) -> None:
    """Nested values are cut, too; of each field its head stays, so a value's length is part of the layout."""
    rules: Rules = {VALUE: None, 5 << 3 | 2: {VALUE: None}}
    data = b"".join(parts)
    cut = split(data, rules)
    if cut is None:
        assert PADDING in parts
        return
    key, values = cut
    assert len(key) + sum(map(len, values)) == len(data)
    others = split(bytes(data), rules)
    assert others == cut
    with_more = split(data + unknown, rules)
    assert with_more is None or (with_more[0] != key) == bool(unknown)
