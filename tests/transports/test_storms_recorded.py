"""What stock clients were recorded to send in storms of deadlines, cancels and reconnects, sent to our HTTP/2."""

from __future__ import annotations

import asyncio
import lzma
from pathlib import Path

import pytest
from h2_core import joined
from h2_peers import PATH, SECONDS, Client, Frame, Served, served

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import ConnectionEnded, StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived
from waiting import until

FOLDER = Path(__file__).parent / "recordings"
RECORDED = sorted(path.name for path in FOLDER.glob("*.xz"))
CLIENTS = ("c-core", "go", "java", "nghttp2")
STORMS = ("deadlines", "cancels", "reconnects")
REFUSED = ErrorCode.REFUSED_STREAM.to_bytes(4)
TOGETHER = 10
"""Connections, where many clients reconnect at once."""


def pieces_of(name: str) -> list[bytes]:
    """What one connection's client sent, as it came."""
    packed = lzma.decompress((FOLDER / name).read_bytes())
    pieces, at = [], 0
    while at < len(packed):
        start = at + 4
        at = start + int.from_bytes(packed[at:start])
        pieces.append(packed[start:at])
    return pieces


class Core:
    """A connection without a socket, whose owner answers healthy calls at once, and no others."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.healthy: list[int] = []
        self.held = self.resets = 0
        self.sent = b""

    def feed(self, data: bytes) -> None:
        for event in joined(self.connection.feed(data)):
            assert not isinstance(event, ConnectionEnded), event
            if isinstance(event, StreamReset):
                assert not event.by_us
                self.resets += 1
            elif isinstance(event, RequestReceived | CompleteRequest):
                if event.headers.path == f"{PATH}Echo":
                    self.healthy.append(event.stream)
                    self.connection.out.headers(event.stream, b"\x88", end=True)
                else:
                    self.held += 1
        self.sent += b"".join(self.connection.out.take())

    def refused(self) -> list[int]:
        """The streams that were."""
        numbers, at = [], 0
        while at < len(self.sent):
            start = at + frames.HEAD_BYTES
            length, kind = int.from_bytes(self.sent[at : at + 3]), self.sent[at + 3]
            if kind == frames.RST_STREAM and self.sent[start : start + 4] == REFUSED:
                numbers.append(int.from_bytes(self.sent[at + 5 : start]))
            at = start + length
        return numbers


def test_every_client_has_been_recorded_in_every_storm() -> None:
    assert {name.removesuffix(".xz") for name in RECORDED} == {
        f"{client}-{storm}" for client in CLIENTS for storm in STORMS
    }


@pytest.mark.parametrize("name", RECORDED)
def test_the_core_takes_all_of_a_storm(name: str) -> None:
    core = Core()
    for piece in pieces_of(name):
        core.feed(piece)
    assert core.refused() == []
    assert core.healthy
    assert core.held > 800
    if "reconnects" not in name:
        assert core.resets == core.held
        assert not core.connection.streams


def _parts_of(name: str) -> tuple[list[bytes], bytes, list[int]]:
    """What its client sent until its first call, and all of the rest; and the healthy calls."""
    core, pieces, first = Core(), iter(pieces_of(name)), []
    while not core.healthy:
        first.append(next(pieces))
        core.feed(first[-1])
    rest = b"".join(pieces)
    core.feed(rest)
    return first, rest, core.healthy


async def _replay(here: Served, first: list[bytes], rest: bytes, count: int) -> tuple[Client, list[Frame]]:
    """Send it: until the first call is answered, as its client did, and then all of the rest at once."""
    client = await here.client()
    for piece in first:
        await client.send(piece)
    got = [await client.next(frames.DATA)]
    sending = asyncio.create_task(client.send(rest))
    while sum(frame.kind == frames.DATA for frame in got) < count:
        frame = await client.frame()
        assert frame is not None
        got.append(frame)
    await asyncio.wait_for(sending, SECONDS)
    return client, got


@pytest.mark.parametrize("name", RECORDED)
async def test_a_storm_ends_neither_its_connection_nor_healthy_calls(name: str) -> None:
    async with served() as here, here.channel() as channel:
        echo = channel.unary_unary(f"{PATH}Echo")
        assert await echo(b"1", timeout=SECONDS) == b"1"
        count = TOGETHER if "reconnects" in name else 2
        first, rest, healthy = _parts_of(name)
        replayed = await asyncio.gather(*(_replay(here, first, rest, len(healthy)) for _ in range(count)))
        for _, got in replayed:
            answered = [frame.stream for frame in got if frame.kind == frames.DATA]
            assert sorted(answered) == healthy
            assert not [frame for frame in got if frame.kind == frames.GOAWAY]
            codes = {frame.code for frame in got if frame.kind == frames.RST_STREAM}
            assert ErrorCode.REFUSED_STREAM not in codes
        assert len(here.server.connections) == count + 1
        assert await echo(b"2", timeout=SECONDS) == b"2"
        for client, _ in replayed:
            await client.close()
        await until(lambda: here.server.open_calls == 0)
        assert await echo(b"3", timeout=SECONDS) == b"3"
