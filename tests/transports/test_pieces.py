"""Bytes that come in pieces, which take memory once, and those that are written at once, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from triglot.transports.growing import LONG_BYTES, LONG_UNKNOWN, MAX_RESERVED, GrowingBytes
from triglot.transports.unsent import write_pieces

PIECE = LONG_BYTES // 4


def pieces(size: int) -> list[bytes]:
    return [bytes([at % 251]) * min(PIECE, size - at * PIECE) for at in range(-(-size // PIECE))]


@pytest.mark.parametrize(
    "size", [0, 1, PIECE, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1, LONG_UNKNOWN, LONG_UNKNOWN + 1]
)
@pytest.mark.parametrize("more", [None, -1, 0, 1, LONG_BYTES])
def test_what_is_added_is_taken(size: int, more: int | None) -> None:
    growing = GrowingBytes(None if more is None else max(0, size + more))
    for piece in pieces(size):
        growing.add(piece)
    assert len(growing) == size
    assert growing.take() == b"".join(pieces(size))


@pytest.mark.parametrize("piece", [3 * LONG_BYTES, MAX_RESERVED + 1])
@pytest.mark.parametrize("length", [None, LONG_BYTES, MAX_RESERVED + 2])
def test_large_pieces(piece: int, length: int | None) -> None:
    growing = GrowingBytes(length)
    growing.add(b"a")
    growing.add(b"b" * piece)
    assert growing.take() == b"a" + b"b" * piece


@pytest.mark.parametrize(("size", "is_known"), [(40, True), (60, True), (60, False)])
def test_memory_is_taken_once(size: int, is_known: bool) -> None:
    """Tracemalloc counts what is reserved, too, of which nothing is in memory before it comes."""
    piece = b"x" * PIECE
    tracemalloc.start()
    try:
        growing = GrowingBytes(size * LONG_BYTES if is_known else None)
        for _ in range(size * LONG_BYTES // PIECE):
            growing.add(piece)
        taken = growing.take()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(taken) == size * LONG_BYTES
    # The short part is copied into the long one.
    most = size * LONG_BYTES + 2 * LONG_BYTES if is_known else MAX_RESERVED + 2 * LONG_UNKNOWN
    assert peak < most


LARGE = bytes(1 << 20)


class Paused(asyncio.Protocol):
    """Sets an event when the socket's buffer is full."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def pause_writing(self) -> None:
        self.event.set()


async def pieces_of_a_slow_reader_and_after_close() -> list[dict[str, Any]]:
    """Return what the loop's handler of exceptions gets."""
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    ours, theirs = socket.socketpair()
    with theirs:
        transport, protocol = await loop.create_connection(Paused, sock=ours)
        write_pieces(transport, [b"first ", b"second"])
        assert await asyncio.to_thread(theirs.recv, 100) == b"first second"
        write_pieces(transport, [LARGE, memoryview(LARGE)])
        assert protocol.event.is_set() or await asyncio.wait_for(protocol.event.wait(), 10)
        transport.abort()
        write_pieces(transport, [b"late ", b"pieces"])
        transport.close()
        write_pieces(transport, [b"late ", b"pieces"])
        await asyncio.sleep(0)
    return errors


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_pieces_are_held_back_and_are_dropped_once_closing(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(pieces_of_a_slow_reader_and_after_close()) == []


async def pieces_after_close() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        transport.close()
        write_pieces(transport, [b"late ", b"pieces"])
        await asyncio.sleep(0)
        assert await asyncio.to_thread(theirs.recv, 100) == b""


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_nothing_is_written_once_closed(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(pieces_after_close())
