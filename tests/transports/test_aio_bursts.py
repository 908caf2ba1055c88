"""Many calls at once over grpc.aio: none ends otherwise than the server or its client says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.transports.call_ends import seen
from tests.transports.h2_peers import SECONDS, Client, data, frame, greeting, message, opened, request_fields
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import DEFAULTS

BURST = 1500
"""More than a connection may have at once."""
ECHO = "/t.T/Echo"


def channels(port: int, count: int) -> list[grpc.aio.Channel]:
    """Each with a connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    return [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) for _ in range(count)]


async def codes(calls: Iterable[Any]) -> Counter[str]:
    return Counter(
        [outcome.code for outcome in await asyncio.gather(*(seen(call, with_details=False) for call in calls))]
    )


@pytest.mark.parametrize("count", [1, 4])
async def test_a_burst_is_answered(count: int) -> None:
    async with opened("aio") as (_, port):
        made = channels(port, count)
        calls = [made[number % count].unary_unary(ECHO)(b"1", timeout=SECONDS) for number in range(BURST)]
        assert await codes(calls) == {"OK": BURST}
        for channel in made:
            await channel.close()


@pytest.mark.parametrize("count", [1, 4])
async def test_calls_cancelled_together_end_no_others(count: int) -> None:
    many = 600
    async with opened("aio") as (rows, port):
        made = channels(port, count)
        held = [
            made[number % count].unary_unary("/t.T/Held")(b"1", timeout=1.0 if number % 2 else SECONDS)
            for number in range(many)
        ]
        await asyncio.wait_for(rows.held.wait(), SECONDS)
        healthy = [made[number % count].unary_unary(ECHO)(b"1", timeout=SECONDS) for number in range(many)]
        for call in held[::2]:
            call.cancel()
        assert await codes(held[::2]) == {"CANCELLED": many // 2}
        assert await codes(held[1::2]) == {"DEADLINE_EXCEEDED": many // 2}
        assert await codes(healthy) == {"OK": many}
        for channel in made:
            await channel.close()


async def test_a_connection_has_as_many_streams_as_over_h2() -> None:
    async with opened("aio") as (_, port):
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        await client.send(greeting())
        settings = (await client.next(frames.SETTINGS)).payload
        assert frames.Setting.MAX_CONCURRENT_STREAMS.to_bytes(2) + DEFAULTS.max_streams.to_bytes(4) in settings
        await client.close()


async def test_open_calls_have_a_limit_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triglot.transports.aio.server.MAX_OPEN_CALLS", 1)  # It is no option.
    async with opened("aio") as (rows, port):
        (channel,) = channels(port, 1)
        held = channel.unary_unary("/t.T/Held")(b"1", timeout=SECONDS)
        await asyncio.wait_for(rows.held.wait(), SECONDS)
        assert await codes([channel.unary_unary(ECHO)(b"1", timeout=SECONDS)]) == {"RESOURCE_EXHAUSTED": 1}
        rows.gate.set()
        assert await held == b"1"
        await channel.close()


async def test_calls_go_on_while_a_client_resets_its_own() -> None:
    async with opened("aio") as (_, port):
        attacker = Client(*await asyncio.open_connection("127.0.0.1", port))
        fields = [(":authority", "here"), *request_fields("Echo")]  # grpc's core takes none without.
        await attacker.send(greeting(), attacker.raw_headers(1, fields), data(1, message(b"1")))
        await attacker.next(frames.HEADERS)
        block = attacker.raw_headers(1, fields)[frames.HEAD_BYTES :]
        reset = frames.ErrorCode.CANCEL.to_bytes(4)
        (channel,) = channels(port, 1)
        calls = []
        for first in range(3, 20_000, 500):
            calls.append(channel.unary_unary(ECHO)(b"1", timeout=SECONDS))
            await attacker.send(
                *(
                    frame(frames.HEADERS, frames.END_HEADERS, stream, block)
                    + data(stream, message(b"1"))
                    + frame(frames.RST_STREAM, 0, stream, reset)
                    for stream in range(first, first + 500, 2)
                )
            )
        assert await codes(calls) == {"OK": len(calls)}
        await channel.close()
        await attacker.close()
