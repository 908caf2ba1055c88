"""gRPC's messages: whichever way a body is cut, and wherever it is received to, they are the same."""

from __future__ import annotations

import zlib

import pytest
from h2_peers import message
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import PayloadTooLarge
from triglot.transports.http2.buffers import BufferPool
from triglot.transports.http2.messages import (
    IN_PLACE_BYTES,
    RESERVED_BYTES,
    CompressedMessage,
    MessageReader,
    inflate,
)

SIZES = st.integers(0, 40) | st.sampled_from([IN_PLACE_BYTES - 1, IN_PLACE_BYTES, IN_PLACE_BYTES + 1, 200_000])


def read(reader: MessageReader, body: bytes, cuts: list[int]) -> list[bytes]:
    at = turn = 0
    while at < len(body):
        size = cuts[turn % len(cuts)]
        room = reader.room()
        if room is not None and turn % 2:  # As the connection does it, or as it does with what is in its buffer.
            size = min(size, len(room), len(body) - at)
            room[:size] = body[at : at + size]
            reader.filled(size)
        else:
            reader.feed(memoryview(body)[at : at + size])
        at += size
        turn += 1
    return [
        bytes(message.data if isinstance(message, CompressedMessage) else message) for message in reader.messages
    ]


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 1)), max_size=5),
    st.lists(st.integers(1, 10) | st.integers(1, 100_000), min_size=1, max_size=4),
)
def test_any_cutting(sizes: list[tuple[int, int]], cuts: list[int]) -> None:
    if sum(size for size, _ in sizes) > 1000:
        cuts = [*cuts, 50_000]
    sent = [bytes([at]) * size for at, (size, _) in enumerate(sizes)]
    body = b"".join(message(content, packed=packed) for content, (_, packed) in zip(sent, sizes, strict=True))
    reader = MessageReader(200_000, BufferPool().take)
    assert read(reader, body, cuts) == sent
    assert reader.is_complete
    assert [isinstance(message, CompressedMessage) for message in reader.messages] == [
        bool(packed) for _, packed in sizes
    ]


def test_large_message_is_a_read_only_view() -> None:
    reader = MessageReader(200_000, BufferPool().take)
    read(reader, message(bytes(100_000)), [1000])
    (received,) = reader.messages
    assert isinstance(received, memoryview)
    assert received.readonly
    assert received.nbytes == 100_000


def test_room_grows_with_what_comes() -> None:
    size = 3 * RESERVED_BYTES
    reader = MessageReader(size, BufferPool().take)
    reader.feed(memoryview(message(b"", size=size)))
    room = reader.room()
    assert room is not None
    assert len(room) == RESERVED_BYTES
    room[-1] = 7
    reader.filled(RESERVED_BYTES)
    for _ in range(2):
        assert reader.room() is None
        reader.feed(memoryview(b"more"))
        room = reader.room()
        assert room is not None
        assert len(room) == RESERVED_BYTES - 4
        reader.filled(RESERVED_BYTES - 4)
    (received,) = reader.messages
    assert len(received) == size
    assert isinstance(received, memoryview)
    assert received[RESERVED_BYTES - 1] == 7


def test_a_message_that_is_inflated_too_far_is_not() -> None:
    packed = zlib.compress(bytes(10**6))
    parts: list[int] = []
    with pytest.raises(PayloadTooLarge):
        inflate(packed, "deflate", 10**6 - 1, parts.append)
    parts.clear()
    assert inflate(packed, "deflate", 10**6, parts.append) == bytes(10**6)
    assert sum(parts) == 10**6
