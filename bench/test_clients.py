"""The load clients against real servers: `pytest bench`.

A bench that takes wrong replies for good ones is worth nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
from aiohttp import web

from bench import h2client, httpclient, payloads
from bench.tally import BenchError, LoadConnection, Outcome, Request, close, drive

MIB = 2**20
PATH = "/inference.GRPCInferenceService/ModelInfer"
STOCK: tuple[tuple[str, int], ...] = ()
TIGHT = (
    ("grpc.http2.lookahead_bytes", 65535),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_frame_size", 16384),
)
Context: TypeAlias = Any  # grpc has no types
GrpcHandler = Callable[[bytes, Context], Awaitable[bytes]]


def grpc_server(
    handler: GrpcHandler, options: Sequence[tuple[str, int]] = STOCK
) -> contextlib.AbstractAsyncContextManager[int]:
    return serving({"ModelInfer": grpc.unary_unary_rpc_method_handler(handler)}, options)


@contextlib.asynccontextmanager
async def serving(methods: dict[str, Any], options: Sequence[tuple[str, int]] = STOCK) -> AsyncIterator[int]:
    """The port of a server of these methods of KServe's service."""
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=[*limits, *options])
    service = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


@contextlib.asynccontextmanager
async def rest_server(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[int]:
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/infer", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    yield runner.addresses[0][1]
    await runner.cleanup()


async def grpc_load(port: int, body: bytes, in_flight: int, expected: bytes, connections: int = 1) -> Outcome:
    opened = await h2client.connect(port, PATH, [Request(body)], in_flight, connections)
    return await run(opened, payloads.framed([expected]))


async def rest_load(port: int, body: bytes, in_flight: int, expected: bytes) -> Outcome:
    request = httpclient.request_bytes(port, "/infer", {"Content-Type": "application/octet-stream"}, body)
    return await run(await httpclient.connect(port, [Request(request)], in_flight), expected)


async def run(connections: Sequence[LoadConnection], expected: bytes) -> Outcome:
    """Two runs on the same connections, as the bench does it."""
    try:
        await drive(connections, 0.03, expected, patience=20)
        return await drive(connections, 0.06, expected, patience=20)
    finally:
        await close(*connections)


async def echo(request: bytes, context: Context) -> bytes:
    return request


@pytest.mark.parametrize("options", [STOCK, TIGHT], ids=["stock", "tight"])
@pytest.mark.parametrize(
    ("size", "in_flight"),
    [(64, 1), (64, 8), (64, 64), (MIB, 1), (MIB, 8), (MIB, 32), (16 * MIB, 1), (16 * MIB, 4)],
)
async def test_h2_echo(size: int, in_flight: int, options: tuple[tuple[str, int], ...]) -> None:
    body = bytes(payloads.tensor(1, size // 4).data.cast("B"))
    seen: set[int] = set()

    async def handler(request: bytes, context: Context) -> bytes:
        if request != body:
            seen.add(len(request))
        return request

    async with grpc_server(handler, options) as port:
        outcome = await grpc_load(port, body, in_flight, body)
    assert outcome.calls == len(outcome.latencies) >= in_flight
    assert 0 < min(outcome.latencies) < outcome.seconds
    assert not seen


async def test_h2_several_connections() -> None:
    async with grpc_server(echo) as port:
        outcome = await grpc_load(port, b"x" * 1000, 8, b"x" * 1000, connections=4)
    assert outcome.calls >= 8


async def test_h2_empty_messages() -> None:
    async with grpc_server(echo) as port:
        assert (await grpc_load(port, b"", 4, b"")).calls >= 4


async def test_h2_abort_is_an_error() -> None:
    numbers = count()

    async def handler(request: bytes, context: Context) -> bytes:
        if next(numbers) == 3:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return request

    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match=r"1 wrong replies.*trailers without any data"):
            await grpc_load(port, b"x" * 100, 8, b"x" * 100)


@pytest.mark.parametrize("size", [10, 16 * MIB])
async def test_h2_unimplemented_is_an_error(size: int) -> None:
    async with grpc_server(echo) as port:
        connections = await h2client.connect(
            port, "/inference.GRPCInferenceService/Other", [Request(b"x" * size)], 1
        )
        with pytest.raises(BenchError, match=r"trailers without any data|stream reset"):
            await run(connections, b"x" * size)


async def test_h2_wrong_length_is_an_error() -> None:
    async with grpc_server(echo) as port:
        with pytest.raises(BenchError, match="105 bytes in place of 106"):
            await grpc_load(port, b"x" * 100, 8, b"x" * 101)


async def test_h2_wrong_bytes_are_an_error() -> None:
    async with grpc_server(echo) as port:
        with pytest.raises(BenchError, match="right length, 105, but other bytes"):
            await grpc_load(port, b"x" * 100, 8, b"x" * 99 + b"y")


async def test_h2_silence_is_an_error() -> None:
    async def handler(request: bytes, context: Context) -> bytes:
        await asyncio.Event().wait()
        return request

    async with grpc_server(handler) as port:
        connections = await h2client.connect(port, PATH, [Request(b"x")], 2)
        with pytest.raises(BenchError, match="2 calls without a reply"):
            await drive(connections, 0.1, b"x", patience=0.2)
        await close(*connections)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "http1"])
async def test_h2_refused_by_a_server_of_another_kind(greeting: bytes) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(BenchError, match=r"server closed the connection|no HTTP/2"):
            await h2client.connect(server.sockets[0].getsockname()[1], PATH, [Request(b"x")], 1)


async def test_h2_lost_connection_is_an_error() -> None:
    async def vanish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes.fromhex("000000 04 00 00000000"))  # Empty SETTINGS.
        await reader.readuntil(b"ModelInfer")
        writer.close()

    async with await asyncio.start_server(vanish, "127.0.0.1", 0) as server:
        with pytest.raises(BenchError, match="server"):
            await grpc_load(server.sockets[0].getsockname()[1], b"x", 8, b"x")


@pytest.mark.parametrize(("size", "in_flight"), [(0, 1), (64, 64), (3 * MIB, 4)])
async def test_http_echo(size: int, in_flight: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with rest_server(handler) as port:
        outcome = await rest_load(port, body, in_flight, body)
    assert outcome.calls == len(outcome.latencies) >= in_flight


async def failing(request: web.Request) -> web.StreamResponse:
    await request.read()
    return web.Response(status=503, text="overloaded")


async def chunked(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse()
    await reply.prepare(request)
    await reply.write(await request.read())
    return reply


async def closing(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def shorter(request: web.Request) -> web.StreamResponse:
    return web.Response(body=(await request.read())[:-1])


async def other(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"y" * len(await request.read()))


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (failing, "503 Service Unavailable: overloaded"),
        (chunked, "without Content-Length"),
        (closing, "server closed the connection"),
        (shorter, "99 bytes in place of 100"),
        (other, "right length, 100, but other bytes"),
    ],
)
async def test_http_errors(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], text: str) -> None:
    async with rest_server(handler) as port:
        with pytest.raises(BenchError, match=text):
            await rest_load(port, b"x" * 100, 4, b"x" * 100)
