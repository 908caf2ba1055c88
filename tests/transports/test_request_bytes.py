"""Bodies of requests in flight: one total for every transport, counted while they grow, and a least rate."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.scheduling.scripted_models import Plain
from tests.transports.h2_peers import SECONDS, Client, data, message
from tests.transports.live import Live, live, request
from tests.transports.test_h2_rest import answer, client_of, fields
from tests.transports.test_http_requests import Answer, wire
from tests.waiting import until
from triglot.core.errors import Cancelled, QueueFull
from triglot.protocols.rows import DamagedBody, InflatedTooLarge
from triglot.transports.http2.core import frames
from triglot.transports.inflate import PART_BYTES, WINDOW_BITS, inflate
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest import decoding
from triglot.transports.rest.decoding import FREE_BYTES

pytestmark = pytest.mark.both_transports

LIMIT = 1_000_000
INFER = "/v2/models/same/infer"
TINY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[3]}]}'
REACHED = f"request buffer limit of {LIMIT} bytes reached; see the server's option max_total_queue_bytes"


@asynccontextmanager
async def served(limit: int = LIMIT) -> AsyncIterator[Live]:
    same = Plain(lambda inputs: {"y": inputs["x"]})
    async with live({"same": same}, grpc_transport="h2", max_total_queue_bytes=limit) as here:
        yield here


def held(here: Live) -> int:
    return here.server._request_bytes.held


class Upload:
    """A POST of a body of `size` bytes whose parts the test sends."""

    def __init__(self, size: int, *headers: tuple[str, str]) -> None:
        self.size = size
        self.headers = headers

    async def begin(self, here: Live, stack: AsyncExitStack) -> None:
        raise NotImplementedError

    async def send(self, part: bytes, *, end: bool = False) -> None:
        raise NotImplementedError

    async def answer(self) -> Answer:
        raise NotImplementedError


class Http1(Upload):
    async def begin(self, here: Live, stack: AsyncExitStack) -> None:
        self._wire = await stack.enter_async_context(await wire(here))
        lines = [f"{name}: {value}" for name, value in self.headers]
        self._wire.send("POST", INFER, b"", f"Content-Length: {self.size}", *lines)

    async def send(self, part: bytes, *, end: bool = False) -> None:
        self._wire.writer.write(part)
        await self._wire.writer.drain()

    async def answer(self) -> Answer:
        return await self._wire.answer()


class Http2(Upload):
    async def begin(self, here: Live, stack: AsyncExitStack) -> None:
        self._client: Client = await stack.enter_async_context(client_of(here.server.grpc_port))
        headers = ("content-length", str(self.size)), *self.headers
        await self._client.send(self._client.raw_headers(1, fields("POST", INFER, *headers)))

    async def send(self, part: bytes, *, end: bool = False) -> None:
        for at in range(0, len(part), 16_000):
            last = end and at + 16_000 >= len(part)
            await self._client.send(data(1, part[at : at + 16_000], end=last))

    async def answer(self) -> Answer:
        head, body = await asyncio.wait_for(answer(self._client), SECONDS)
        return Answer(int(head[":status"]), head, body)


both = pytest.mark.parametrize("kind", [Http1, Http2])
Make = Callable[..., Upload]


def padded(size: int) -> bytes:
    return TINY + b" " * (size - len(TINY))


@both
async def test_uploads_together_are_bounded(kind: Make) -> None:
    size, sent = 700_000, 600_000
    body = padded(size)
    async with served() as here, AsyncExitStack() as stack:
        first, second = kind(size), kind(size)
        for upload in (first, second):
            await upload.begin(here, stack)
        await first.send(body[:sent])
        await until(lambda: held(here) == sent)
        await second.send(body[:sent])
        refused = await second.answer()
        assert (refused.status, refused.text, refused.headers["retry-after"]) == (429, REACHED, "1")
        await until(lambda: held(here) == sent)
        # A small one has room, and so has the first, once it goes on.
        async with here.session.post(f"http://127.0.0.1:{here.server.rest_port}{INFER}", data=TINY) as small:
            assert small.status == 200
        await first.send(body[sent:], end=True)
        assert (await first.answer()).status == 200
        assert held(here) == 0


@both
async def test_the_total_is_that_of_grpc_too(kind: Make) -> None:
    async with served() as here, AsyncExitStack() as stack:
        client = await stack.enter_async_context(client_of(here.server.grpc_port))
        part = message(bytes(LIMIT - FREE_BYTES), size=LIMIT)
        infer = "/inference.GRPCInferenceService/ModelInfer"
        await client.send(client.headers(1, infer))
        for at in range(0, len(part), 16_000):
            await client.send(data(1, part[at : at + 16_000], end=False))
        await until(lambda: held(here) == len(part))
        upload = kind(500_000)
        await upload.begin(here, stack)
        await upload.send(padded(500_000), end=True)
        refused = await upload.answer()
        assert (refused.status, refused.text) == (429, REACHED)
        await client.send(frames.rst_stream(1, frames.ErrorCode.CANCEL))
        await until(lambda: held(here) == 0)


@both
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_what_is_inflated_is_counted_as_it_grows(kind: Make, coding: str) -> None:
    bomb = gzip.compress(padded(50 * LIMIT), 1) if coding == "gzip" else _deflated(padded(50 * LIMIT))
    async with served(2 * LIMIT) as here, AsyncExitStack() as stack:
        upload = kind(len(bomb), ("content-encoding", coding))
        await upload.begin(here, stack)
        await upload.send(bomb, end=True)
        refused = await upload.answer()
        assert refused.status == 429
        assert "request buffer limit of 2000000 bytes reached" in refused.text
        assert held(here) == 0


def _deflated(body: bytes) -> bytes:

    return zlib.compress(body, 1)


@pytest.mark.parametrize("path", ["ModelInfer", "ModelStreamInfer"])
async def test_a_bomb_over_grpc_is_counted_as_it_grows(path: str) -> None:
    bomb = gzip.compress(request("same", bytes(20 * LIMIT)), 1)
    async with served(2 * LIMIT) as here, client_of(here.server.grpc_port) as client:
        await client.send(
            client.headers(1, f"/inference.GRPCInferenceService/{path}", ("grpc-encoding", "gzip")),
        )
        part = message(bomb, packed=1)
        for at in range(0, len(part), 16_000):
            await client.send(data(1, part[at : at + 16_000], end=at + 16_000 >= len(part)))
        status = await client.status(1)
        assert status["grpc-status"] == "8"
        assert "request buffer limit of 2000000 bytes reached" in status["grpc-message"]
        await until(lambda: held(here) == 0)


@both
async def test_a_body_that_trickles_is_not_waited_for(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GRACE_SECONDS", 0.3)  # It is no option.
    async with served() as here, AsyncExitStack() as stack:
        upload = kind(10_000)
        await upload.begin(here, stack)
        answering = asyncio.create_task(upload.answer())
        sent = 0
        while not answering.done():
            await upload.send(b" ")
            sent += 1
            await asyncio.wait([answering], timeout=0.02)
        refused = await answering
        assert refused.status == 400
        assert "expected at least 240 bytes a second after 0.3 seconds" in refused.text
        assert held(here) == 0


@both
async def test_a_body_that_is_quick_enough_is_read(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GRACE_SECONDS", 0.3)
    body = padded(10_000)
    async with served() as here, AsyncExitStack() as stack:
        upload = kind(len(body))
        await upload.begin(here, stack)
        for at in range(0, len(body), 1000):  # 20 times as quick as needs be.
            await upload.send(body[at : at + 1000], end=at + 1000 >= len(body))
            await asyncio.sleep(0.05)
        assert (await upload.answer()).status == 200


# --- the count, without a server ---


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_inflated_in_parts(coding: str, size: int) -> None:
    body = json.dumps(list(range(size // 7 + 1))).encode()[:size]
    packed = gzip.compress(body) if coding == "gzip" else _deflated(body)
    parts: list[int] = []
    assert inflate(packed, WINDOW_BITS[coding], size, parts.append) == body
    assert sum(parts) == size
    assert max(parts, default=0) <= PART_BYTES
    with pytest.raises(DamagedBody):
        inflate(packed[:-1], WINDOW_BITS[coding], size, parts.append)
    if size:
        with pytest.raises(InflatedTooLarge):
            inflate(packed, WINDOW_BITS[coding], size - 1, parts.append)


def test_inflating_ends_with_the_first_part_too_many() -> None:
    total = RequestBytes(5 * PART_BYTES)
    packed = gzip.compress(bytes(50 * PART_BYTES))
    made: list[int] = []
    with total.reserve(0) as reserved:

        def grow(count: int) -> None:
            made.append(count)
            reserved.grow(count)

        with pytest.raises(QueueFull):
            inflate(packed, WINDOW_BITS["gzip"], 2**31, grow)
        assert sum(made) == total.held == 6 * PART_BYTES
    assert total.held == 0
    with pytest.raises(Cancelled):
        reserved.grow(1)
    assert total.held == 0


@pytest.mark.parametrize("members", [1, 3])
def test_a_small_step_of_input_never_loses_what_follows(members: int) -> None:
    texts: Sequence[bytes] = [
        bytes([at]) * 200_000 + json.dumps(list(range(40_000))).encode() for at in range(members)
    ]
    packed = b"".join(gzip.compress(text, 1) for text in texts)
    sizes: list[int] = []
    assert inflate(packed, WINDOW_BITS["gzip"], 2**31, sizes.append) == b"".join(texts)


def test_no_limit() -> None:
    total = RequestBytes(0)
    total.add(2**40)
    total.check()
    total.add(-(2**40))
    assert total.held == 0
