"""gRPC's messages, however they are cut; and their memory, used again, and never while it is referenced."""

from __future__ import annotations

import gc
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.transports.h2_core import Part, joined
from tests.transports.h2_peers import frame, greeting, message, request_fields
from triglot.core.errors import PayloadTooLarge, QueueFull
from triglot.core.tensor import array_over
from triglot.transports.http2.buffers import ALIGNMENT, BufferPool
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import BULK_BYTES, READ_BYTES, Connection, read_buffer
from triglot.transports.http2.core.events import DataPlaced, DataReceived
from triglot.transports.http2.core.receiving import DIRECT_BYTES, RequestReceived
from triglot.transports.http2.messages import (
    IN_PLACE_BYTES,
    RESERVED_BYTES,
    CompressedMessage,
    MessageReader,
    inflate,
)

SIZE = 1024 * 1024


def address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def array(kept: memoryview) -> NDArray[Any]:
    """As a codec lays it over a message."""
    return array_over(kept[: len(kept) // 4 * 4], np.dtype("<f4"), (len(kept) // 4,))


def test_unreferenced_memory_is_reused() -> None:
    pool = BufferPool()
    room, kept = pool.take(SIZE, SIZE)
    first = address(room)
    assert (pool.lent, pool.kept) == (1, 0)
    del kept
    assert pool.lent == 0
    assert pool.kept >= SIZE
    room, _kept = pool.take(SIZE - 100, SIZE - 100)
    assert abs(address(room) - first) <= 2 * ALIGNMENT + 100
    assert (pool.lent, pool.kept) == (1, 0)


# Whoever lays something over the memory in another way than these is not held up by them, and has to be added.
WAYS: dict[str, Callable[[memoryview], Any]] = {
    "slice": lambda kept: kept[10:20],
    "array": array,
    "view of an array": lambda kept: array(kept)[5:7].reshape(2, 1),
    "frombuffer": lambda kept: np.frombuffer(kept, np.uint8)[3:4],
    "asarray": lambda kept: np.asarray(kept)[3:4],
    "view of another type": lambda kept: array(kept).view(np.int32)[:1].view(np.uint8),
    "memoryview of an array": lambda kept: array(kept)[:1].data,
    "broadcast": lambda kept: np.broadcast_to(array(kept)[:1], (3,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_laid_over_it_keeps_it(way: str) -> None:
    pool = BufferPool()
    room, kept = pool.take(SIZE, SIZE)
    room[:] = b"\x05" * SIZE
    view = WAYS[way](kept)
    del kept
    assert pool.lent == 1
    other, other_kept = pool.take(SIZE, SIZE)
    assert abs(address(other) - address(room)) >= SIZE
    other[:] = bytes(SIZE)
    assert set(memoryview(view).tobytes()) == {5}
    del view
    assert pool.lent == 1
    del other_kept
    assert pool.lent == 0


def test_the_last_reference_may_go_on_any_thread_and_in_the_garbage_collector() -> None:
    pool = BufferPool()
    taken = [pool.take(SIZE, SIZE)[1] for _ in range(8)]
    threads = [threading.Thread(target=taken.pop) for _ in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.lent == 1
    circle: list[Any] = [taken.pop()]
    circle.append(circle)
    del circle
    gc.collect()
    assert pool.lent == 0
    assert pool.kept >= 8 * SIZE


def test_kept_blocks_are_bounded_and_unused_sizes_are_freed_first() -> None:
    pool = BufferPool(max_kept=5 * SIZE)
    large = pool.take(4 * SIZE, 4 * SIZE)[1]
    small = [pool.take(SIZE, SIZE)[1] for _ in range(4)]
    del large
    assert pool.kept == 4 * SIZE
    small.clear()
    assert pool.kept == 4 * SIZE
    first = [address(pool.take(SIZE, SIZE)[0]) for _ in range(4)]
    assert len(set(first)) == 1  # Each was given back at once, and is the next one.
    huge = pool.take(6 * SIZE, 6 * SIZE)[1]
    del huge
    assert pool.kept == 4 * SIZE


def test_a_pool_that_rests_keeps_nothing() -> None:
    pool = BufferPool()
    kept = pool.take(SIZE, SIZE)[1]
    del kept
    pool.release_unused()
    assert pool.kept >= SIZE  # Something was taken since the last time.
    pool.release_unused()
    assert pool.kept == 0


def test_the_end_is_aligned() -> None:
    pool = BufferPool()
    for sent in (100_000, 100_001, 163_840 + 13):
        for size in (sent, sent - 1000):
            room, kept = pool.take(size, sent)
            assert len(room) == len(kept) == size
            assert (address(room) + sent) % ALIGNMENT == 0
            assert kept.readonly
            del room, kept


def test_no_memory_is_an_error_of_the_call() -> None:
    def none(_: int, __: int) -> tuple[memoryview, memoryview]:
        raise MemoryError

    reader = MessageReader(SIZE, none)
    with pytest.raises(QueueFull, match="not enough memory for a message of 1000000 bytes"):
        reader.feed(memoryview(message(b"", size=1_000_000)))


class Receiver:
    """A connection whose streams' messages are read as the server does it."""

    def __init__(self, buffer: memoryview | None = None) -> None:
        self.pool = BufferPool()
        self.readers: dict[int, MessageReader] = {}
        self.connection = Connection(buffer=buffer)
        self.placed = 0

    def begin(self, number: int) -> bytes:
        self.readers[number] = MessageReader(10**7, self.pool.take)
        # Without the dynamic table, so that blocks may be sent in any order.
        fields = [(name, value, True) for name, value in request_fields("Echo")]
        return frame(frames.HEADERS, frames.END_HEADERS, number, Encoder().encode(fields))

    def feed(self, data: bytes, step: int) -> None:
        """As from a socket that has `step` bytes at a time."""
        at = 0
        while at < len(data):
            room = self.connection.get_buffer()
            size = min(len(room), len(data) - at, step)
            room[:size] = data[at : at + size]
            at += size
            for event in joined(self.connection.received(size)):
                if isinstance(event, Part):
                    self.readers[event.stream].feed(memoryview(event.data))
                    self.connection.consumed(event.stream, len(event.data))
                elif isinstance(event, DataPlaced):
                    self.placed += event.size
                    self.connection.consumed(event.stream, event.size)
                elif isinstance(event, RequestReceived):
                    self.connection.receive_into(event.stream, self.readers[event.stream])


def padded(number: int, payload: bytes, padding: int) -> bytes:
    """A DATA frame with so many bytes of padding, its length among them."""
    if not padding:
        return frame(frames.DATA, 0, number, payload)
    return frame(frames.DATA, frames.PADDED, number, bytes([padding - 1]) + payload + bytes(padding - 1))


@given(
    st.lists(st.integers(IN_PLACE_BYTES, 3 * IN_PLACE_BYTES) | st.integers(0, 100), min_size=1, max_size=4),
    st.lists(
        st.tuples(
            st.integers(5000, 120_000) | st.integers(1, 20),
            st.sampled_from([0, 0, 1, 200]),
            st.sampled_from([1, 3]),
        ),
        min_size=1,
        max_size=5,
    ).filter(lambda cuts: max(size for size, _, _ in cuts) >= 5000),
    st.sampled_from([977, 20_000, 65_536, 10**6]),
)
def test_messages_of_any_sizes_in_any_frames(
    sizes: list[int], cuts: list[tuple[int, int, int]], step: int
) -> None:
    sent = {
        number: [np.random.default_rng(number + at).bytes(size) for at, size in enumerate(sizes)]
        for number in (1, 3)
    }
    bodies = {number: b"".join(map(message, all_of)) for number, all_of in sent.items()}
    receiver = Receiver()
    receiver.feed(greeting() + receiver.begin(1) + receiver.begin(3), step)
    turn = 0
    while any(bodies.values()):
        size, padding, number = cuts[turn % len(cuts)]
        number = number if bodies[number] else 4 - number
        receiver.feed(padded(number, bodies[number][:size], padding), step)
        bodies[number] = bodies[number][size:]
        turn += 1
    assert not receiver.connection.over
    for number, reader in receiver.readers.items():
        assert list(map(bytes, reader.messages)) == sent[number]  # type: ignore[arg-type]  # None is packed.


def test_most_of_a_large_message_is_received_in_its_place_whatever_the_frames() -> None:
    body = message(np.random.default_rng(0).bytes(SIZE))
    receiver = Receiver()
    receiver.feed(greeting() + receiver.begin(1), SIZE)
    cuts = [body[at : at + 130_000] for at in range(0, len(body), 130_000)]
    receiver.feed(b"".join(frame(frames.DATA, 0, 1, cut) for cut in cuts), 10**6)
    (received,) = receiver.readers[1].messages
    assert bytes(received) == body[5:]  # type: ignore[arg-type]  # It is not packed.
    assert receiver.placed >= SIZE - READ_BYTES


def test_closed_reader_releases_its_memory() -> None:
    receiver = Receiver()
    receiver.feed(greeting() + receiver.begin(1) + frame(frames.DATA, 0, 1, message(b"x", size=SIZE)), 10**6)
    assert receiver.pool.lent == 1
    receiver.readers.clear()
    receiver.connection.reset(1, frames.ErrorCode.CANCEL)
    assert receiver.pool.lent == 0


def test_bytes_after_a_reset_are_discarded() -> None:
    """A socket that has nothing after all asks for the buffer again; its stream may be over by then."""
    receiver = Receiver()
    receiver.feed(greeting() + receiver.begin(1), SIZE)
    sent = frame(frames.DATA, 0, 1, message(bytes(READ_BYTES + 2 * DIRECT_BYTES)))
    receiver.feed(sent[:READ_BYTES], READ_BYTES)
    server = receiver.connection
    assert READ_BYTES < len(server.get_buffer()) < BULK_BYTES  # The message's own memory.
    server.reset(1, frames.ErrorCode.CANCEL)
    receiver.feed(sent[READ_BYTES:] + frames.ping(bytes(8)), READ_BYTES)
    assert server.out.take()[-1] == frames.ping(bytes(8), ack=True)
    assert not server.over


def test_connections_share_what_they_read_into() -> None:
    """Whatever is cut off at the end of what one has read is there when it reads again."""
    buffer = read_buffer()
    receivers = [Receiver(buffer) for _ in range(2)]
    sent = [[np.random.default_rng(at).bytes(size) for size in (90_000, 7, 300_000)] for at in range(2)]
    streams = [
        greeting()
        + receiver.begin(1)
        + b"".join(frame(frames.DATA, 0, 1, body[at : at + 16_384]) for at in range(0, len(body), 16_384))
        for receiver, body in zip(receivers, (b"".join(map(message, messages)) for messages in sent), strict=True)
    ]
    for at in range(0, max(map(len, streams)), 1001):
        for receiver, stream in zip(receivers, streams, strict=True):
            receiver.feed(stream[at : at + 1001], 1001)
    for receiver, messages in zip(receivers, sent, strict=True):
        assert list(map(bytes, receiver.readers[1].messages)) == messages  # type: ignore[arg-type]  # Nor these.


def test_much_is_read_at_once_only_while_bodies_come_in_small_frames() -> None:
    receiver = Receiver()
    server = receiver.connection
    receiver.feed(greeting() + receiver.begin(1), SIZE)
    assert len(server.get_buffer()) == READ_BYTES
    receiver.feed(frame(frames.DATA, 0, 1, message(b"x" * 10_000, size=SIZE)), SIZE)
    assert len(server.get_buffer()) == BULK_BYTES
    receiver.feed(frame(frames.DATA, 0, 1, bytes(DIRECT_BYTES)), SIZE)
    assert len(server.get_buffer()) == READ_BYTES


def test_connection_keeps_nothing_of_its_events() -> None:
    server = Receiver().connection
    server.feed(greeting() + Receiver().begin(1))
    sent = frame(frames.DATA, 0, 1, b"a part")
    server.get_buffer()[: len(sent)] = sent
    (event,) = server.received(len(sent))
    assert isinstance(event, DataReceived)
    part = weakref.ref(event.parts[0])
    del event
    assert part() is None


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
