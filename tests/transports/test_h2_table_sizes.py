"""SETTINGS_HEADER_TABLE_SIZE of clients: header blocks acknowledge a smaller table.

By RFC 9113, 4.3.1, and RFC 7541, 4.2. The clients are strict, as nghttp2, Node's http2 and Envoy are: after they
have made the table smaller, a block that does not begin with its size is COMPRESSION_ERROR.
"""

from __future__ import annotations

from collections.abc import Sequence

import hpack
import pytest

from tests.transports.h2_core import CLOSED, connection
from tests.transports.h2_peers import Client, data, frame, greeted, greeting, message, served
from tests.transports.test_h2_rest import ONE, answer, client_of, fields
from tests.transports.tls_server import server
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import Connection

SIZE = frames.Setting.HEADER_TABLE_SIZE
SIZES = [
    (0,),
    (1,),
    (1024,),
    (4095,),
    (4096,),
    (65_536,),
    (4096, 0, 4096),
    (65_536, 100),
    (0, 4096),
    (100, 50, 0),
    (65_536, 8192),
    (4096, 4096),
]


async def announce(client: Client, size: int) -> None:
    """Change the size of the client's table."""
    await client.send(frames.settings({SIZE: size}))
    while not (await client.next(frames.SETTINGS)).flags & frames.ACK:
        pass
    client._decoder.max_allowed_table_size = size


@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_grpc_calls_after_each_size(sizes: Sequence[int]) -> None:
    async with served() as here:
        client = await greeted(here)
        for at, size in enumerate(sizes):
            await announce(client, size)
            stream = 2 * at + 1
            await client.send(client.headers(stream, "Echo"), data(stream, message(b"1")))
            assert (await client.status(stream))["grpc-status"] == "0"
        await client.close()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_rest_calls_after_each_size(sizes: Sequence[int]) -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        for at, size in enumerate(sizes):
            await announce(client, size)
            await client.send(client.raw_headers(2 * at + 1, fields("GET", "/v2/health/ready"), 5))
            assert (await answer(client, 2 * at + 1))[0][":status"] == "200"


BLOCK = b"\x88" + hpack.Encoder().encode([("a", "b")])


def begins(connection: Connection) -> list[bool]:
    """Whether each header block that was sent begins with the size of the table."""
    sent, begun = b"".join(connection.out.take()), []
    while sent:
        size, kind = int.from_bytes(sent[:3]), sent[3]
        if kind == frames.HEADERS:
            begun.append(sent[frames.HEAD_BYTES] & 0xE0 == 0x20)
        sent = sent[frames.HEAD_BYTES + size :]
    return begun


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([{SIZE: 4096}], False),
        ([{SIZE: 65_536}], False),
        ([{SIZE: 4095}], True),
        ([{SIZE: 0}, {SIZE: 4096}], True),
        ([{SIZE: 65_536}, {SIZE: 8192}], True),
        ([{frames.Setting.MAX_FRAME_SIZE: 20_000}], False),
    ],
    ids=str,
)
def test_only_a_smaller_table_is_acknowledged_and_once(
    settings: list[dict[frames.Setting, int]], expected: bool
) -> None:
    receiver = connection()
    receiver.feed(greeting() + b"".join(map(frames.settings, settings)))
    for number in (1, 3):
        receiver.feed(CLOSED[:5] + number.to_bytes(4) + CLOSED[9:])
        receiver.out.headers(number, BLOCK, end=True)
    assert begins(receiver) == [expected, False]


def test_a_table_that_is_smaller_for_the_time_of_one_frame() -> None:
    receiver = connection()
    payload = b"".join(SIZE.to_bytes(2) + size.to_bytes(4) for size in (4096, 0, 4096))
    receiver.feed(greeting() + frame(frames.SETTINGS, 0, 0, payload) + CLOSED)
    receiver.out.headers(1, BLOCK, end=True)
    assert begins(receiver) == [True]


@pytest.mark.parametrize("all_at_once", [True, False])
def test_trailers_that_wait_behind_data_for_a_window(all_at_once: bool) -> None:
    """They were made before the table became smaller, and leave after it."""
    receiver = connection()
    receiver.feed(greeting(initial_window_size=1) + CLOSED)
    if all_at_once:
        receiver.out.respond(1, BLOCK, [b"body"], 4, BLOCK)
    else:
        receiver.out.headers(1, BLOCK)
        receiver.out.data(1, [b"body"])
        receiver.out.trailers(1, BLOCK)
    assert begins(receiver) == [False]
    receiver.feed(frames.settings({SIZE: 0}) + frames.window_update(1, 100))
    assert begins(receiver) == [True]
