"""Storms by gRPC's own client: calls that end together cost no other call anything."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from h2_peers import PATH, SECONDS, opened

OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
DEADLINE_SECONDS = 0.5
LONG = 2 * SECONDS


class Healthy:
    """Calls one after the other, and a stream that is open all the time, beside a storm on the same channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._echo: Any = channel.unary_unary(f"{PATH}Echo")
        self._stream: Any = channel.stream_stream(f"{PATH}Both")(timeout=LONG)
        self._storm_over = asyncio.Event()
        self._calls: asyncio.Task[int] | None = None

    async def __aenter__(self) -> Healthy:
        await self._exchange(b"first")
        self._calls = asyncio.create_task(self._call())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raise what a call ended with, if one has failed."""
        assert self._calls is not None
        self._storm_over.set()
        assert await asyncio.wait_for(self._calls, LONG) > 1
        await self._exchange(b"last")
        await self._stream.done_writing()
        assert await self._stream.read() is grpc.aio.EOF
        assert await self._stream.code() is grpc.StatusCode.OK

    async def _exchange(self, data: bytes) -> None:
        await self._stream.write(data)
        assert await asyncio.wait_for(self._stream.read(), SECONDS) == data

    async def _call(self) -> int:
        for number in itertools.count(1):
            over = self._storm_over.is_set()
            body = str(number).encode()
            assert await self._echo(body, timeout=LONG) == body
            if over:
                return number
        raise AssertionError


async def storm(channel: grpc.aio.Channel, count: int, how: str) -> Counter[grpc.StatusCode]:
    """So many unanswered calls end at once; with what."""
    held: Any = channel.unary_unary(f"{PATH}Held")
    loop = asyncio.get_running_loop()
    at = loop.time() + DEADLINE_SECONDS
    if how == "deadlines":
        calls = [held(b"1", timeout=at - loop.time()) for _ in range(count)]
    else:
        calls = [held(b"1") for _ in range(count)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
    return Counter(await asyncio.wait_for(asyncio.gather(*(call.code() for call in calls)), SECONDS))


ENDS = {"deadlines": grpc.StatusCode.DEADLINE_EXCEEDED, "cancels": grpc.StatusCode.CANCELLED}


@asynccontextmanager
async def channels(port: int, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """So many, each with a connection of its own."""
    async with AsyncExitStack() as ends:
        made = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) for _ in range(count)]
        yield [await ends.enter_async_context(channel) for channel in made]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("count", [200, 360, 1000])
async def test_calls_that_end_together_on_one_channel(count: int, how: str) -> None:
    async with opened("h2") as (rows, port), channels(port, 1) as (channel,):
        rows.gate.set()
        async with Healthy(channel):
            rows.gate.clear()
            for _ in range(3):
                assert await storm(channel, count, how) == {ENDS[how]: count}
            rows.gate.set()


@pytest.mark.parametrize("how", ENDS)
async def test_calls_that_end_together_on_many_channels(how: str) -> None:
    async with opened("h2") as (rows, port), channels(port, 10) as made:
        rows.gate.set()
        async with AsyncExitStack() as ends:
            for channel in made:
                await ends.enter_async_context(Healthy(channel))
            rows.gate.clear()
            assert await asyncio.gather(*(storm(channel, 100, how) for channel in made)) == [{ENDS[how]: 100}] * 10
            rows.gate.set()


async def test_clients_that_leave_with_open_calls_and_come_again() -> None:
    async with opened("h2") as (rows, port), channels(port, 1) as (channel,):
        rows.gate.set()
        async with Healthy(channel):
            for _ in range(3):
                rows.gate.clear()
                async with channels(port, 20) as made:
                    calls = [channel.unary_unary(f"{PATH}Held")(b"1") for channel in made for _ in range(20)]
                    await asyncio.wait_for(rows.held.wait(), SECONDS)
                assert Counter([await call.code() for call in calls]) == {grpc.StatusCode.CANCELLED: 400}
                rows.gate.set()
                async with channels(port, 20) as made:
                    echoes = (channel.unary_unary(f"{PATH}Echo")(b"1", timeout=LONG) for channel in made)
                    assert await asyncio.gather(*echoes) == [b"1"] * 20
