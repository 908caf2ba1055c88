"""The native load client against real servers; where there is none, our own one is used."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import grpc
import pytest
from aiohttp import web

from bench import native, payloads
from bench.native import Native
from bench.payloads import REST, Exchange, framed
from bench.tally import BenchError, Outcome
from bench.test_clients import PATH, Context, echo, failing, grpc_server, rest_server, shorter

pytestmark = pytest.mark.skipif(not native.found(), reason="h2load, of Debian's nghttp2-client, is not installed")
BODY = b"x" * 100


def nothing(headers: object, body: bytes) -> None:
    """What a reply means is not looked at here."""


async def grpc_load(
    port: int, in_flight: int, expected: bytes = BODY, patience: float = 20.0
) -> tuple[Outcome, float]:
    client = Native(port, Exchange(PATH, BODY, BODY, nothing), in_flight, framed([expected]))
    return await client.run(0.1, 1000.0, patience)


async def rest_load(port: int, in_flight: int) -> Outcome:
    exchange = Exchange("/infer", BODY, BODY, nothing, {"content-type": "application/octet-stream"}, kind=REST)
    return (await Native(port, exchange, in_flight, BODY).run(0.1, 1000.0))[0]


@pytest.mark.parametrize("in_flight", [1, 8, 64])
async def test_grpc_calls_are_counted(in_flight: int) -> None:
    came = count()
    most = now = 0

    async def handler(request: bytes, context: Context) -> bytes:
        nonlocal most, now
        assert request == BODY
        next(came)
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return request

    async with grpc_server(handler) as port:
        outcome, used = await grpc_load(port, in_flight)
    assert outcome.calls == len(outcome.latencies) == next(came) == max(100, native.LEAST * in_flight)
    assert 0 < min(outcome.latencies) <= max(outcome.latencies) <= outcome.seconds
    assert most <= in_flight
    assert used > 0


@pytest.mark.parametrize("in_flight", [1, 16])
async def test_rest_calls_are_counted(in_flight: int) -> None:
    came = count()

    async def handler(request: web.Request) -> web.Response:
        assert request.content_type == "application/octet-stream"
        next(came)
        return web.Response(body=await request.read())

    async with rest_server(handler) as port:
        outcome = await rest_load(port, in_flight)
    assert outcome.calls == len(outcome.latencies) == next(came)


async def test_errors_over_grpc() -> None:
    numbers = count()

    async def handler(request: bytes, context: Context) -> bytes:
        if next(numbers) == 50:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return request

    async with grpc_server(handler) as port:
        with pytest.raises(
            BenchError, match=r"the replies to 100 calls have 10395 bytes, expected 105 each, 10500"
        ):
            await grpc_load(port, 8)


async def test_a_reply_of_another_length() -> None:
    async with grpc_server(echo) as port:
        with pytest.raises(BenchError, match="expected 106 each"):
            await grpc_load(port, 8, BODY + b"x")


@pytest.mark.parametrize(
    ("handler", "text"), [(failing, "0 of 100 calls"), (shorter, "9900 bytes, expected 100 each")]
)
async def test_errors_over_rest(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], text: str
) -> None:
    async with rest_server(handler) as port:
        with pytest.raises(BenchError, match=text):
            await rest_load(port, 4)


async def test_silence_is_an_error() -> None:
    async def handler(request: bytes, context: Context) -> bytes:
        await asyncio.Event().wait()
        return request

    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match="had no replies to its 100 calls"):
            await grpc_load(port, 2, patience=0.3)


async def test_nobody_listens() -> None:
    with pytest.raises(BenchError, match=r"0 of 100 calls|ended with"):
        await grpc_load(1, 2)


def test_its_version() -> None:
    assert native.version().startswith("h2load of nghttp2 1.")
    assert payloads.UNARY != payloads.REST
