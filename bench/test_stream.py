"""The benches of streams and of shared memory run, and count what they say."""

import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from bench import streamclient
from bench.payloads import framed
from bench.rounds import Plan
from bench.tally import BenchError, Outcome, Request, close, drive
from bench.test_clients import Context, serving

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
PLAN = Plan(rounds=1, seconds=0.05)
Handler = Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]


def stream_server(handler: Handler) -> contextlib.AbstractAsyncContextManager[int]:
    return serving({"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(handler)})


async def run(port: int, in_flight: int, expected: bytes) -> Outcome:
    """Two runs on one connection, as the bench does it."""
    connection = await streamclient.connect(port, PATH, [Request(b"x" * 100)], in_flight)
    try:
        await drive([connection], 0.1, framed([expected]), patience=20)
        return await drive([connection], 0.2, framed([expected]), patience=20)
    finally:
        await close(connection)


@pytest.mark.parametrize("in_flight", [1, 8, 2000])
async def test_every_message_is_answered(in_flight: int) -> None:
    numbers = {"came": 0, "streams": 0}

    async def handler(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        numbers["streams"] += 1
        numbers["came"] = 0
        async for request in requests:
            numbers["came"] += 1
            yield request

    async with stream_server(handler) as port:
        outcome = await run(port, in_flight, b"x" * 100)
    assert numbers["streams"] == 2
    assert outcome.calls == len(outcome.latencies) == numbers["came"] >= in_flight
    assert 0 < min(outcome.latencies) <= outcome.seconds


async def test_another_answer_is_an_error() -> None:
    async def handler(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b"y" * 100

    async with stream_server(handler) as port:
        with pytest.raises(BenchError, match="the first answer is"):
            await run(port, 4, b"x" * 100)


async def test_a_stream_that_ends_early_is_an_error() -> None:
    async def handler(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        yield await anext(requests)

    async with stream_server(handler) as port:
        with pytest.raises(BenchError, match=r"the stream ended with \d+ answers missing|stream reset"):
            await run(port, 4, b"x" * 100)


async def test_answers_of_another_size_are_an_error() -> None:
    async def handler(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        yield await anext(requests)
        yield b"short"

    async with stream_server(handler) as port:
        with pytest.raises(
            BenchError, match=r"an answer of 10 bytes in place of 105|10 bytes left over|stream reset"
        ):
            await run(port, 1, b"x" * 100)
