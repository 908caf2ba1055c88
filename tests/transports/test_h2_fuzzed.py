"""Calls, resets, windows and nonsense in any order: nothing fails, nothing stays, and others are answered."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.transports.h2_peers import SECONDS, Client, data, frame, message, served
from tests.waiting import until
from triglot.transports.http2.core import frames

pytestmark = pytest.mark.both_event_loops

NAMES = ("Echo", "Wrong", "Held", "Count", "Both", "No")
FIELDS = ((), (("grpc-timeout", "1m"),), (("grpc-encoding", "gzip"),), (("a-bin", "?"),))


def part(chosen: random.Random, client: Client, begun: int) -> bytes:
    """Something that a client may send that has begun so many streams; a new one most of all."""
    stream = chosen.randrange(1, 2 * begun + 2, 2)
    match chosen.choices(range(6), [45, 35, 8, 7, 2, 3])[0]:
        case 0:
            return client.headers(2 * begun + 1, chosen.choice(NAMES), *chosen.choice(FIELDS))
        case 1:
            size, packed = chosen.choice([0, 3, 70_000, 150_000]), chosen.choice([0, 0, 0, 1, 2])
            body = message(bytes(size), packed=packed, size=chosen.choice([None, None, 5]))
            return data(stream, body[: chosen.choice([len(body), len(body), 4, 9])], end=chosen.random() < 0.6)
        case 2:
            return frame(frames.RST_STREAM, 0, stream, bytes(4))
        case 3:
            return frames.window_update(chosen.choice([0, stream]), chosen.choice([1, 1000, 100_000]))
        case 4:
            return frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: chosen.choice([0, 5, 65_535])})
        case _:
            kind, flags, number = chosen.randrange(11), chosen.randrange(256), chosen.randrange(5)
            return frame(kind, flags, number, chosen.randbytes(chosen.randrange(12)))


async def converse(chosen: random.Random, client: Client) -> None:
    await client.greet(initial_window_size=chosen.choice([0, 10, 65_535]))
    begun = 0
    for _ in range(chosen.randint(1, 25)):
        sent = part(chosen, client, begun)
        begun += sent[3] == frames.HEADERS
        await client.send(sent)
        if chosen.random() < 0.3:
            await asyncio.sleep(0)
    if chosen.random() < 0.3:
        client.writer.transport.abort()
    else:
        # Everything is received before the end is.
        client.writer.write_eof()
        await client.rest()
    await client.close()


@pytest.mark.parametrize("seed", range(8))
async def test_anything_in_any_order(seed: int) -> None:
    chosen = random.Random(seed)
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with served(max_message_size=200_000) as here, here.channel() as channel:
        here.rows.gate.set()
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        kept = set(here.server.connections)
        tasks = asyncio.all_tasks()
        for _ in range(40):
            await converse(chosen, await here.client())
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        if others := [connection.closed for connection in here.server.connections - kept]:
            await asyncio.wait(others, timeout=SECONDS)
        assert here.server.connections == kept
        assert here.server.open_calls == here.server.request_bytes.held == 0
        await until(lambda: asyncio.all_tasks() <= tasks)
    assert unhandled == []
