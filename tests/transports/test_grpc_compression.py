"""Compressed answers over gRPC: only for clients that accept them, and only where that helps."""

from __future__ import annotations

import asyncio
import random
import zlib

import grpc.aio
import pytest

from tests.transports.h2_peers import SECONDS, Client, data, greeting, message, opened, request_fields
from triglot.transports.http2.core import frames

both = pytest.mark.parametrize("transport", ["aio", "h2"])
TEXT = b"some words, again and again; " * 200
NOISE = random.Random(7).randbytes(50_000)


async def asked(port: int, method: str, body: bytes, accepts: str | None) -> tuple[str, list[tuple[int, bytes]]]:
    """What a call is answered: the coding of the messages, and each of them with its flag."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    fields = [(":authority", "here"), *request_fields(method)]
    if accepts is not None:
        fields.append(("grpc-accept-encoding", accepts))
    await client.send(greeting(initial_window_size=2**24), frames.window_update(0, 2**24))
    await client.send(client.raw_headers(1, fields))
    for at in range(0, len(body), 16_000):
        await client.send(data(1, body[at : at + 16_000], end=at + 16_000 >= len(body)))
    head: dict[str, str] = {}
    answer = b""
    while (got := await client.frame()) is not None:
        if got.kind == frames.HEADERS:
            fields_of = client.fields(got.payload)
            head = head or fields_of
            if got.flags & frames.END_STREAM:
                assert fields_of["grpc-status"] == "0"
                break
        elif got.kind == frames.DATA:
            answer += got.payload
    await client.close()
    return head.get("grpc-encoding", ""), list(cut(answer))


def cut(body: bytes) -> list[tuple[int, bytes]]:
    """The messages of a body, with their flags."""
    found = []
    while body:
        size = int.from_bytes(body[1:5])
        found.append((body[0], body[5 : 5 + size]))
        body = body[5 + size :]
    return found


def inflated(coding: str, packed: bytes) -> bytes:
    return zlib.decompress(packed, 16 + zlib.MAX_WBITS if coding == "gzip" else zlib.MAX_WBITS)


@both
@pytest.mark.parametrize(
    ("compression", "accepts", "coding"),
    [
        ("gzip", "identity,deflate,gzip", "gzip"),
        ("gzip", "identity, gzip", "gzip"),
        ("gzip", "deflate", "deflate"),
        ("deflate", "identity,deflate,gzip", "deflate"),
        ("deflate", "gzip", "gzip"),
    ],
)
async def test_a_client_that_accepts_it(transport: str, compression: str, accepts: str, coding: str) -> None:
    async with opened(transport, grpc_compression=compression) as (_, port):
        named, [(flag, packed)] = await asked(port, "Echo", message(TEXT), accepts)
        assert (named, flag) == (coding, 1)
        assert inflated(coding, packed) == TEXT
        assert len(packed) < len(TEXT) / 10


@both
@pytest.mark.parametrize("accepts", [None, "", "identity", "br,zstd", "gzipped"])
async def test_a_client_that_does_not(transport: str, accepts: str | None) -> None:
    async with opened(transport, grpc_compression="gzip") as (_, port):
        assert await asked(port, "Echo", message(TEXT), accepts) == ("", [(0, TEXT)])


@both
async def test_server_without_compression(transport: str) -> None:
    async with opened(transport, grpc_compression="none") as (_, port):
        assert await asked(port, "Echo", message(TEXT), "identity,deflate,gzip") == ("", [(0, TEXT)])


@both
@pytest.mark.parametrize("body", [b"", b"x" * 10, NOISE], ids=["empty", "small", "noise"])
async def test_what_would_not_get_smaller(transport: str, body: bytes) -> None:
    async with opened(transport, grpc_compression="gzip") as (_, port):
        _named, answers = await asked(port, "Echo", message(body), "identity,deflate,gzip")
        assert answers == [(0, body)]


@both
async def test_a_large_answer(transport: str) -> None:
    """Compressed beside the event loop."""
    async with opened(transport, grpc_compression="gzip") as (_, port):
        named, [(flag, packed)] = await asked(port, "Echo", message(TEXT * 9), "gzip")
        assert (named, flag, inflated("gzip", packed)) == ("gzip", 1, TEXT * 9)


@both
@pytest.mark.parametrize("sizes", [[10, 5000, 0, 5000], [5000, 10], [10]])
async def test_each_message_of_a_stream_says_so(transport: str, sizes: list[int]) -> None:
    async with opened(transport, grpc_compression="gzip") as (rows, port):
        rows.gate.set()
        messages = [b"x" * size for size in sizes]
        named, answers = await asked(port, "Both", b"".join(map(message, messages)), "identity,gzip")
        assert named == "gzip"
        assert [flag for flag, _ in answers] == [int(size > 1000) for size in sizes]
        assert [inflated("gzip", got) if flag else got for flag, got in answers] == messages


@both
async def test_grpc_reads_what_it_gets(transport: str) -> None:
    async with (
        opened(transport, grpc_compression="deflate") as (rows, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        rows.gate.set()
        for body in (b"", TEXT, NOISE, TEXT * 500):
            assert await channel.unary_unary("/t.T/Echo")(body, timeout=SECONDS) == body
        sent = [b"1", TEXT, NOISE[:5000], TEXT]
        call = channel.stream_stream("/t.T/Both")(iter(sent), timeout=SECONDS)
        assert [got async for got in call] == sent
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Wrong")(TEXT, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
