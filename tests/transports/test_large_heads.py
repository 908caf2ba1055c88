"""Requests with more metadata or larger heads than are taken: each fails alone, and says what the limit is."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import hpack.hpack
import pytest
import pytest_asyncio

from tests.served_models import SECONDS, Function, Gated, serving, twice
from tests.transports.h2_core import BLOCK, END_BOTH, connection
from tests.transports.h2_peers import data, frame, greeting, pairs_of
from tests.transports.live import request
from tests.transports.test_h2_rest import ONE, answer, client_of, fields
from tests.transports.tls_server import HOST
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import ConnectionEnded
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import RequestReceived
from triglot.transports.rest.fields import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES

KIB, MIB = 1024, 1024 * 1024
METHOD = "/inference.GRPCInferenceService/"

# --- gRPC ---


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, 20_000), (1, 57_000), (1, 200_000), (1, 2_000_000), (30, 2600), (700, 4000), (1500, 1), (20_000, 4)],
)
@pytest.mark.parametrize("transport", ["h2", "aio"])
async def test_only_the_call_with_too_much_metadata_fails(transport: str, count: int, size: int) -> None:
    """As by gRPC's C core (1.85.1): behind a proxy that shares connections another client's call continues."""
    async with serving({"gated": (gated := Gated())}, grpc_transport=transport) as here:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"{HOST}:{here.server.grpc_port}", options=options) as channel:
            infer, ready = channel.unary_unary(METHOD + "ModelInfer"), channel.unary_unary(METHOD + "ServerReady")
            body = request("gated", bytes(4), datatype="INT32")
            other_call = asyncio.ensure_future(infer(body, timeout=SECONDS))
            await gated.until_at("infer")
            metadata = [("x-large", "a" * size)] * count
            for _ in range(2):  # The second time by the table, as far as it has entries.
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ready(b"", metadata=metadata, timeout=SECONDS)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert transport == "aio" or "16384" in (refused.value.details() or "")
            assert await ready(b"", timeout=SECONDS)
            gated.open_point("infer")
            assert await other_call
        gated.open_point("infer")


async def test_metadata_below_the_limit_is_passed_on() -> None:
    seen: dict[str, Any] = {}

    def infer(inputs: Any, call: Any) -> Any:
        seen.update(call.metadata)
        return {"y": inputs["x"]}

    async with serving({"keeps": Function(infer)}) as here:
        async with grpc.aio.insecure_channel(f"{HOST}:{here.server.grpc_port}") as channel:
            call = channel.unary_unary(METHOD + "ModelInfer")
            body = request("keeps", bytes(4), datatype="INT32")
            await call(body, metadata=[("x-large", "a" * 7000)], timeout=SECONDS)
        assert seen["x-large"] == "a" * 7000


# --- REST ---

Answer = tuple[int, dict[str, str], bytes]
Ask = Callable[[str, list[tuple[str, str]]], Awaitable[Answer]]
PATH = "/v2/health/ready"


@pytest_asyncio.fixture(params=["h1 rest_port", "h1 grpc_port", "aiohttp rest_port", "h2"])
async def ask(request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    """Sends a GET request with these fields, over HTTP/1.1 by either port and transport, or over HTTP/2."""
    transport, _, port = request.param.partition(" ")
    chosen = {"http_transport": transport} if port else {}
    async with serving({"twice": Function(twice)}, **ONE, **chosen) as here:

        async def by_http1(path: str, given: list[tuple[str, str]]) -> Answer:
            reader, writer = await asyncio.open_connection(HOST, getattr(here.server, port))
            lines = "".join(f"{name}: {value}\r\n" for name, value in given)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n".encode())
            got = await asyncio.wait_for(reader.read(), SECONDS)
            writer.close()
            head, _, body = got.partition(b"\r\n\r\n")
            first, *rest = head.decode().split("\r\n")
            named = [line.split(": ", 1) for line in rest]
            return int(first.split()[1]), {name.lower(): value for name, value in named}, body

        async def by_http2(path: str, given: list[tuple[str, str]]) -> Answer:
            async with client_of(here.server.grpc_port) as client:
                await client.send(client.headers(1, METHOD + "ModelStreamInfer"))  # It goes on.
                await client.send(client.raw_headers(3, fields("GET", path, *given), 5))
                head, body = await answer(client, 3)
                await client.send(client.raw_headers(5, fields("GET", PATH), 5))
                assert (await answer(client, 5))[0][":status"] == "200"
                return int(head[":status"]), head, body

        yield by_http1 if port else by_http2


@pytest.mark.parametrize(
    ("path", "given", "status", "limit"),
    [
        (PATH, [("x-large", "a" * 70_000)], 431, MAX_LINE_BYTES),
        (PATH, [("x-large", "a" * 110_000)], 431, MAX_LINE_BYTES),
        (PATH, [("x-large", "a" * 500_000)], 431, "bytes"),
        (PATH, [("x-large", "a" * 60_000)] * 3, 431, MAX_HEAD_BYTES),
        (PATH, [("x-small", "a" * 1500)] * 100, 431, MAX_HEAD_BYTES),
        (PATH, [("x-tiny", "a")] * 200, 431, MAX_FIELDS),
        (PATH, [("x-tiny", "a")] * 3000, 431, MAX_FIELDS),
        (f"{PATH}?{'a' * 70_000}", [], 414, MAX_LINE_BYTES),
        (f"{PATH}?{'a' * 300_000}", [], 414, MAX_LINE_BYTES),
        (f"/{'a' * 70_000}", [], 414, MAX_LINE_BYTES),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_head_that_is_too_large_is_refused_with_the_limit(
    ask: Ask, path: str, given: list[tuple[str, str]], status: int, limit: object
) -> None:
    got, head, body = await ask(path, given)
    assert (got, head["content-type"]) == (status, "application/json")
    error = json.loads(body)["error"]
    assert str(limit) in error
    assert len(error) < 400


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (PATH, [("x-large", "a" * 60_000)]),
        (PATH, [("x-large", "a" * 60_000)] * 2),
        (PATH, [("x-small", "a" * 1000)] * 120),
        (PATH, [("x-tiny", "a")] * 120),
        (f"{PATH}?{'a' * 60_000}", []),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_large_head_is_taken(ask: Ask, path: str, given: list[tuple[str, str]]) -> None:
    assert (await ask(path, given))[0] == 200


# --- what a connection holds ---


def literal(name: bytes, value: bytes, *, added: bool = False) -> bytes:
    """A field of a header block."""
    strings = hpack.hpack.encode_integer(len(name), 7) + name, hpack.hpack.encode_integer(len(value), 7) + value
    return (b"\x40" if added else b"\x00") + b"".join(map(bytes, strings))


BLOCKS = {
    "a value": literal(b"a", b"b" * 3 * MIB),
    "a name": literal(b"a" * 3 * MIB, b"b"),
    "large fields": literal(b"a", b"b" * 60_000) * 60,
    "fields of the table": literal(b"a", b"b" * 4000, added=True) * 800,
    "small fields": literal(b"a", b"b") * 20_000,
    "indices": literal(b"a", b"b" * 4000, added=True) + b"\xbe" * 100_000,
    "content types": literal(b"content-type", b"application/grpc") * 10_000,
    "paths": literal(b":path", b"/" * 60_000) * 50,
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [16 * KIB, 4 * MIB], ids=["CONTINUATION", "HEADERS"])
def test_little_of_a_large_block_is_held_and_the_next_call_is_read(name: str, size: int) -> None:
    block, more = BLOCK + BLOCKS[name], literal(b"c", b"d", added=True)
    server = connection(connection_window=70_000)
    server.feed(greeting())
    parts = [block[at : at + size] for at in range(0, len(block), size)]
    tracemalloc.start()
    for at, part in enumerate(parts):
        kind = frames.CONTINUATION if at else frames.HEADERS
        assert server.feed(frame(kind, 0, 1, part)) == []
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < MIB
    tracemalloc.stop()
    (event,) = server.feed(frame(frames.CONTINUATION, frames.END_HEADERS, 1, more))
    assert isinstance(event, RequestReceived)
    assert event.headers.too_large
    (event,) = server.feed(frame(frames.HEADERS, END_BOTH, 3, BLOCK + b"\xbe"))
    assert isinstance(event, RequestReceived)
    assert pairs_of(event.headers.fields)[-1] == (b"c", b"d")


@pytest.mark.parametrize("size", [16 * KIB, MIB])
def test_a_block_without_end_ends_the_connection(size: int) -> None:
    server = connection()
    server.feed(greeting() + frame(frames.HEADERS, 0, 1, BLOCK))
    events: list[Any] = []
    count = 0
    while not events:
        events = server.feed(frame(frames.CONTINUATION, 0, 1, literal(b"a", b"b" * (size - 10))))
        count += 1
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].code is ErrorCode.ENHANCE_YOUR_CALM
    assert 2 * MIB < count * size <= 5 * MIB


async def test_large_trailers_are_ignored_as_small_ones_are() -> None:
    async with serving({"twice": Function(twice)}, **ONE) as here, client_of(here.server.grpc_port) as client:
        await client.send(client.headers(1, METHOD + "ServerReady"), data(1, bytes(5), end=False))
        await client.send(client.raw_headers(1, [("x-large", "a" * 200_000)], END_BOTH))
        assert (await client.status(1))["grpc-status"] == "0"
