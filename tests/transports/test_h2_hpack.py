"""Our HPACK decoder beside the library that clients in Python use: what one of them reads the other reads, too."""

from __future__ import annotations

import itertools
from typing import Any

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.h2_peers import decoded, pairs_of
from triglot.access.credentials import CREDENTIAL_FIELDS
from triglot.access.restricted import GRPC_PREFIX
from triglot.transports.http2.core.fields import CREDENTIAL, MALFORMED, METADATA, Field, name_of
from triglot.transports.http2.core.hpack import (
    MAX_WAITING,
    MEASURED,
    TABLE_BYTES,
    BlockParts,
    Decoder,
    HpackError,
    decode_huffman,
)
from triglot.transports.http2.core.limits import MAX_FIELDS, MAX_FIELDS_BYTES

TABLE_SIZES = [0, 40, 100, 400, TABLE_BYTES]
names = st.sampled_from([b":path", b":method", b"te", b"x-a", b"x-bin", b"grpc-timeout"]) | st.binary(max_size=12)
values = st.sampled_from([b"POST", b"/", b"trailers", b""]) | st.binary(max_size=40) | st.binary(min_size=120)
fields = st.tuples(names, values, st.booleans())
blocks = st.lists(
    st.tuples(st.lists(fields, max_size=8), st.booleans(), st.none() | st.sampled_from(TABLE_SIZES)),
    max_size=12,
)


@given(blocks)
def test_blocks_of_another_encoder(made: Any) -> None:
    encoder, decoder = hpack.Encoder(), Decoder()
    for several, is_coded, table_size in made:
        if table_size is not None:
            encoder.header_table_size = table_size
        block = encoder.encode(
            [
                hpack.NeverIndexedHeaderTuple(name, value) if is_secret else hpack.HeaderTuple(name, value)
                for name, value, is_secret in several
            ],
            huffman=is_coded,
        )
        assert pairs_of(decoded(decoder, block)) == [(name, value) for name, value, _ in several]


pieces = st.sampled_from(
    [
        *(b"\x82", b"\x3f\xe1\x1f", b"\x20", b"\x40\x01a\x01b", b"\x40\x81\x1f\x81\x1f"),
        *(b"\x10\x01a\x01b", b"\xbe", b"\x7e\x01c"),
    ]
)


@given(st.lists(st.binary(max_size=60) | st.lists(pieces, max_size=6).map(b"".join), max_size=4))
def test_any_bytes_are_read_alike(made: list[bytes]) -> None:
    ours, theirs = Decoder(), hpack.Decoder()
    theirs.max_allowed_table_size = TABLE_BYTES
    for block in made:
        try:
            expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except (hpack.HPACKError, IndexError, OverflowError):
            with pytest.raises(HpackError):
                ours.decode(block)
            return
        assert pairs_of(decoded(ours, block)) == expected


@given(st.binary(max_size=80))
def test_huffman_codes(text: bytes) -> None:
    assert decode_huffman(HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"\x1c\xff\xff", b"\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\xfc"],
    ids=["only padding", "padding of more than seven bits", "padding of zeros", "the end", "the end, and zeros"],
)
def test_what_ends_wrongly(text: bytes) -> None:
    with pytest.raises(HpackError):
        decode_huffman(text)


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (b"\x80", "an index beyond the tables"),
        (b"\xbe", "an index beyond the tables"),
        (b"\xff\xff\xff\xff\xff\xff\x01", "an integer that is too large"),
        (b"\x40\x05a", "a block that ends too early"),
        (b"\x40", "a block that ends too early"),
        (b"\x82\x20", "a change of the table's size behind a field"),
        (b"\x3f\xe2\x1f", "a table of 4097 bytes, at most 4096 are taken"),
    ],
)
def test_what_is_no_block(block: bytes, what: str) -> None:
    with pytest.raises(HpackError, match=what):
        Decoder().decode(block)


@pytest.mark.parametrize("block", [b"\x82", b"\x00\x01a\x01b", b"\x00\x01a\x01b\x82"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_of_too_many_fields_only_the_size_is_kept(block: bytes, in_parts: bool) -> None:
    size = sum(field.size for field in decoded(Decoder(), block))
    count = 10 * MAX_FIELDS
    if in_parts:
        parts = BlockParts(Decoder())
        for _ in range(count):
            parts.add(block)
        fields = parts.end()
    else:
        fields = decoded(Decoder(), block * count)
    assert len(fields) < 3 * MAX_FIELDS
    assert sum(field.size for field in fields) == count * size


@given(blocks, st.lists(st.integers(1, 50), min_size=1))
def test_a_block_in_parts_is_read_as_in_one(made: Any, sizes: list[int]) -> None:
    encoder, at_once, other = hpack.Encoder(), Decoder(), Decoder()
    for several, is_coded, _ in made:
        block = encoder.encode([(name, value) for name, value, _ in several], huffman=is_coded)
        parts, at = BlockParts(other), 0
        for size in itertools.cycle(sizes):
            parts.add(block[at : at + size])
            at += size
            if at >= len(block):
                break
        assert pairs_of(parts.end()) == pairs_of(decoded(at_once, block))


@given(st.lists(st.binary(max_size=60) | st.lists(pieces, max_size=6).map(b"".join), max_size=4))
def test_any_bytes_in_parts_are_read_as_in_one(made: list[bytes]) -> None:
    at_once, other = Decoder(), Decoder()
    for block in made:
        parts = BlockParts(other)
        try:
            expected = pairs_of(decoded(at_once, block))
        except HpackError:
            with pytest.raises(HpackError):
                _add_bytes(parts, block)
            return
        assert pairs_of(_add_bytes(parts, block)) == expected


def _add_bytes(parts: BlockParts, block: bytes) -> list[Field]:
    for at in range(len(block)):
        parts.add(block[at : at + 1])
    return parts.end()


LONG, HALF = 110_000, 66_000
"""Longer than what is buffered, even in Huffman's code, and no longer than all fields that are kept."""


@pytest.mark.parametrize(
    ("name", "value"),
    [(b"a", b"b" * LONG), (b"a" * LONG, b"b"), (b"a" * HALF, b"b" * HALF), (b":path", b"/" * LONG)],
    ids=["value", "name", "both", "path"],
)
@pytest.mark.parametrize("is_coded", [False, True], ids=["plain", "Huffman"])
@pytest.mark.parametrize("is_added", [False, True], ids=["literal", "indexed"])
@pytest.mark.parametrize("size", [100, 1000])
def test_a_long_field_is_measured_and_the_table_stays_in_step(
    name: bytes, value: bytes, is_coded: bool, is_added: bool, size: int
) -> None:
    encoder = hpack.Encoder()
    decoder = Decoder()
    parts = BlockParts(decoder)
    decoder.decode(encoder.encode([(b"before", b"1")]))
    make = hpack.HeaderTuple if is_added else hpack.NeverIndexedHeaderTuple
    block = encoder.encode(
        [(b"before", b"1"), make(name, value), (b"after", b"2"), (b"before", b"1")], huffman=is_coded
    )
    for at in range(0, len(block), size):
        parts.add(block[at : at + size])
    first, long, *others = parts.end()
    assert pairs_of([first, *others]) == [(b"before", b"1"), (b"after", b"2"), (b"before", b"1")]
    assert len(long.name.value) <= MAX_WAITING
    assert len(long.value) <= 2 * MEASURED
    assert long.kind != MALFORMED
    assert long.size >= (len(name) + len(value)) // 2  # A code has five bits at least.
    assert long.name.value == name[: len(long.name.value)]
    assert long.value == value[: len(long.value)]
    assert pairs_of(decoded(decoder, encoder.encode([(b"after", b"2")]))) == [(b"after", b"2")]


def test_large_fields_in_parts_are_not_kept() -> None:
    parts = BlockParts(Decoder())
    field = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(b"a", b"b" * 60_000)], huffman=False)
    for _ in range(60):
        parts.add(field)
        assert sum(len(field.value) for field in parts.fields) <= MAX_FIELDS_BYTES
    assert sum(field.size for field in parts.end()) == 60 * (32 + 1 + 60_000)


@pytest.mark.parametrize("size", [1, 70_000])
def test_parts_that_end_too_early(size: int) -> None:
    parts = BlockParts(Decoder())
    parts.add(hpack.Encoder().encode([(b"a", b"b" * size)], huffman=False)[:-1])
    with pytest.raises(HpackError, match="a block that ends too early"):
        parts.end()


def test_a_field_that_is_larger_than_the_table_leaves_it_empty() -> None:
    decoder = Decoder()
    decoder.decode(b"\x40\x01a\x01b")
    assert pairs_of(decoded(decoder, b"\xbe")) == [(b"a", b"b")]
    decoder.decode(hpack.Encoder().encode([(b"c", b"d" * TABLE_BYTES)], huffman=False))
    with pytest.raises(HpackError):
        decoder.decode(b"\xbe")


def test_connections_share_the_fields_of_their_tables() -> None:
    """Each has a table of its own, but thousands of them may have the same entries."""
    blocks = [b"\x40\x04name\x05value", b"\xbe"]
    (first, two), (again, _) = (
        [decoded(decoder, block)[0] for block in blocks] for decoder in (Decoder(), Decoder())
    )
    assert first is two is again


def test_access_control_gets_the_fields_that_it_asks_for() -> None:
    asked = {*CREDENTIAL_FIELDS, f"{GRPC_PREFIX}admin-key"}
    assert {name_of(name.encode()).kind for name in asked} == {CREDENTIAL}
    assert {name_of(name).kind for name in (b"x-request-id", GRPC_PREFIX.encode() + b"key-bin")} == {METADATA}
