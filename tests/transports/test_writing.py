"""Pieces that are written at once, on the event loops of the standard library and of uvloop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from triglot.transports.unsent import write_pieces

pytestmark = pytest.mark.both_transports

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
