"""Our HPACK decoder beside the library that clients in Python use: what one of them reads the other reads, too."""

from __future__ import annotations

from typing import Any

import hpack
import pytest
from h2_peers import decoded, pairs_of
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from triglot.access.credentials import CREDENTIAL_FIELDS
from triglot.access.restricted import GRPC_PREFIX
from triglot.transports.http2.core.fields import CREDENTIAL, METADATA, name_of
from triglot.transports.http2.core.hpack import (
    MAX_FIELDS,
    TABLE_BYTES,
    Decoder,
    FieldsTooLarge,
    HpackError,
    decode_huffman,
)

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
def test_too_many_fields(block: bytes) -> None:
    decoder = Decoder()
    assert decoded(decoder, block * (MAX_FIELDS // 2))
    with pytest.raises(FieldsTooLarge, match="more than 49152 bytes of fields"):
        decoder.decode(block * (MAX_FIELDS + 1))


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
    (one, two), (again, _) = (
        [decoded(decoder, block)[0] for block in blocks] for decoder in (Decoder(), Decoder())
    )
    assert one is two is again


def test_access_control_gets_the_fields_that_it_asks_for() -> None:
    asked = {*CREDENTIAL_FIELDS, f"{GRPC_PREFIX}admin-key"}
    assert {name_of(name.encode()).kind for name in asked} == {CREDENTIAL}
    assert {name_of(name).kind for name in (b"x-request-id", GRPC_PREFIX.encode() + b"key-bin")} == {METADATA}
