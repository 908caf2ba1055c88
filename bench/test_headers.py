"""The load client's header blocks are those of gRPC's own client, and mean what they should."""

import asyncio
from copy import deepcopy
from random import Random

import grpc
import grpc.aio
import hpack
import pytest

from bench.h2frames import DATA, END_STREAM, FRAME, HEADERS, PREFACE, SETTINGS, frame, settings
from bench.headers import HeaderBlocks, Metadata

PATH = "/inference.GRPCInferenceService/ModelInfer"
AUTHORITY = "127.0.0.1:1234"
RANDOM = Random(5)


def trace() -> Metadata:
    return Metadata([(b"traceparent", f"00-{RANDOM.randbytes(16).hex()}-{RANDOM.randbytes(8).hex()}-01".encode())])


def wanted(timeout: bytes | None, metadata: Metadata) -> list[tuple[bytes, bytes]]:
    fields = [(b":path", PATH.encode()), (b":authority", AUTHORITY.encode())]
    fields += [(b":method", b"POST"), (b":scheme", b"http"), (b"content-type", b"application/grpc")]
    fields += [(b"te", b"trailers"), (b"grpc-accept-encoding", b"identity, deflate, gzip")]
    fields += [(b"grpc-timeout", timeout)] if timeout else []
    return [*fields, (b"user-agent", b"triglot-bench"), *metadata.fields]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("limit", [4096, 300, 60, 0])
def test_blocks_mean_what_was_meant(limit: int, indexed: bool) -> None:
    blocks, decoder = HeaderBlocks(PATH, AUTHORITY, indexed), hpack.Decoder()
    blocks.limit_table(limit)
    decoder.max_allowed_table_size = limit
    for _ in range(2000):
        timeout, metadata = RANDOM.randint(900, 1100), trace()
        block = blocks.block(timeout, metadata)
        given = decoder.decode(block, raw=True)
        text = dict(given)[b"grpc-timeout"]
        assert timeout <= int(text[:-1]) * (1000 if text.endswith(b"S") else 1) <= timeout * 1.04 + 10
        assert given == wanted(text, metadata)
        assert decoder.header_table._current_size <= limit


def test_equal_calls_are_references() -> None:
    blocks, decoder = HeaderBlocks(PATH, AUTHORITY), hpack.Decoder()
    first, second, third = (blocks.block() for _ in range(3))
    assert len(first) > 100
    assert second == third
    assert len(second) == 8
    for block in (first, second, third):
        assert decoder.decode(block, raw=True) == wanted(None, Metadata())


async def blocks_of_grpc(calls: list[tuple[float, Metadata]]) -> list[bytes]:
    """What grpcio's client writes for such calls."""
    blocks: list[bytes] = []
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        encoder = hpack.Encoder()
        writer.write(settings())
        await reader.readexactly(len(PREFACE))
        while True:
            try:
                head, flags, stream = FRAME.unpack(await reader.readexactly(9))
            except asyncio.IncompleteReadError:
                break
            payload = await reader.readexactly(head >> 8)
            if head & 255 == SETTINGS and not flags:
                writer.write(frame(SETTINGS, 1, 0))
            elif head & 255 == HEADERS:
                blocks.append(payload)
            elif head & 255 == DATA and flags & END_STREAM:
                reply = encoder.encode([(":status", "200"), ("content-type", "application/grpc")])
                writer.write(frame(HEADERS, 4, stream, reply) + frame(DATA, 0, stream, bytes(5)))
                writer.write(frame(HEADERS, 5, stream, encoder.encode([("grpc-status", "0")])))
        writer.close()
        over.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        options = (("grpc.default_authority", AUTHORITY), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary(PATH)
            for timeout, metadata in calls:
                fields = [(name.decode(), value.decode()) for name, value in metadata.fields]
                await call(b"x", timeout=timeout, metadata=fields, wait_for_ready=True)
        await over.wait()
    return blocks


async def test_grpc_writes_the_same() -> None:
    calls = [(RANDOM.randint(900, 1100), trace()) for _ in range(600)]
    theirs = await blocks_of_grpc([(timeout / 1000, metadata) for timeout, metadata in calls])
    agent = dict(hpack.Decoder().decode(theirs[0], raw=True))[b"user-agent"].decode()
    blocks = HeaderBlocks(PATH, AUTHORITY, agent=agent)
    for (timeout, metadata), block in zip(calls, theirs, strict=True):
        # What is left of the timeout is rounded, and some of it has gone by: more where the machine is busy.
        for left in range(timeout + 1, 0, -1):
            tried = deepcopy(blocks)
            if tried.block(left, metadata) == block:
                blocks = tried
                break
        else:
            pytest.fail(
                f"{timeout} ms: {block!r} is none of ours, which would be {blocks.block(timeout, metadata)!r}"
            )
