"""No odd request gets by the access file: each is sent without a right credential, over every transport.

An answer is known by the values that the model makes, which nothing else has; a change by the server's state.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.access.access_files import anonymous, client, write
from tests.access.odd_requests import (
    BEARER,
    BODY,
    GRPC,
    INFER,
    JSON,
    OTHER,
    RIGHT,
    SERVICE,
    TOKEN,
    Fields,
    Sent,
    grpc_body,
    grpc_requests,
    head,
    http1,
    http1_requests,
    http2,
    pseudo,
    rest_requests,
    with_credential,
)
from tests.process import write_model
from tests.state_changes import ChangingServer, changing_server
from tests.transports.h2_peers import SECONDS, Client, data, frame
from tests.transports.tls_server import HOST
from tests.waiting import until_found
from triglot.transports.http2.core import frames

SECRET = (b"4321.0", struct.pack("<f", 4321.0))
"""What the model `half` makes of the requests."""
RIGHTFUL = (b"2160.5", struct.pack("<f", 2160.5))
"""What the model `other` does."""
MODEL = """import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] * 0.25}
"""
ALL = client("all", [RIGHT], ["health", "inspect", "infer", "administer"])
TRANSPORTS = [("h2", "h1"), ("aio", "aiohttp")]
INFER_RPC = f"{SERVICE}ModelInfer"
Requests = dict[str, tuple[Any, Any]]
"""By their names; each without a right credential, and with one, if there can be one."""
Answered = Callable[[Any], Awaitable[bytes]]
"""Sends a request by a connection of its own; all that comes back."""


def has(answer: bytes, values: Iterable[bytes]) -> bool:
    """Whether any of the values is in it."""
    return any(value in answer for value in values)


@asynccontextmanager
async def serving(folder: Path, grpc_transport: str, http_transport: str) -> AsyncIterator[ChangingServer]:
    """With two models, and an access file that lets everybody see health."""
    write_model(folder / "repository" / "other", MODEL)
    file = write(folder / "access.toml", ALL, anonymous(["health"]))
    options = {"grpc_transport": grpc_transport, "http_transport": http_transport}
    options["audit_log"] = str(folder / "audit.log")
    async with changing_server(folder, access=str(file), **options) as here:
        here.session.headers["x-api-key"] = RIGHT
        yield here


def over_http1(port: int) -> Answered:
    """By HTTP/1.1; the client sends no more after the request."""

    async def answered(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(request)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), SECONDS)
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    return answered


def over_http2(port: int) -> Answered:
    """By HTTP/2, until stream 1 ends, or the connection."""

    async def answered(request: tuple[Sent, Fields]) -> bytes:
        make, fields = request
        peer = Client(*await asyncio.open_connection(HOST, port))
        await peer.greet()
        await peer.send(make(peer, fields))
        got = b""
        while (received_frame := await peer.frame()) is not None:
            got += received_frame.payload
            is_complete = (
                received_frame.kind in (frames.HEADERS, frames.DATA) and received_frame.flags & frames.END_STREAM
            )
            if received_frame.stream == 1 and (is_complete or received_frame.kind == frames.RST_STREAM):
                break
        peer.writer.transport.abort()
        return got

    return answered


class Route:
    """One way to the server. `right` is a rightful request there, by `other` where this way is none."""

    def __init__(self, name: str, answered: Answered, right: Any, other: Answered | None = None) -> None:
        self.name = name
        self.answered = answered
        self.right = right
        self.right_answered = other or answered

    async def wrong(self, here: ChangingServer, requests: Requests) -> list[str]:
        """Those that get by."""
        before = await here.state()
        found = []
        for name, (request, _) in requests.items():
            try:
                if has(await self.answered(request), SECRET):
                    found.append(f"{self.name}, {name}: it is answered")
                if not has(await self.right_answered(self.right), RIGHTFUL):
                    found.append(f"{self.name}, {name}: the next call is not answered")
                if name.startswith("unload") and (after := await here.state()) != before:
                    found.append(f"{self.name}, {name}: something has changed")
                    before = after
            except TimeoutError:
                found.append(f"{self.name}, {name}: there is no end")
        if await here.state() != before:
            found.append(f"{self.name}: something has changed")
        return found

    async def served(self, requests: Requests) -> int:
        """How many are answered to who has the right credential."""
        answers = [await self.answered(right) for _, right in requests.values() if right is not None]
        return sum(has(answer, SECRET) for answer in answers)


def by_http2(found: Mapping[str, tuple[Sent, bool]]) -> Requests:
    """What `over_http2` sends."""
    return {name: ((make, ()), (make, [BEARER]) if may else None) for name, (make, may) in found.items()}


@pytest.mark.parametrize(("grpc_transport", "http_transport"), TRANSPORTS)
async def test_none_gets_by(
    tmp_path: Path, grpc_transport: str, http_transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    over_1: Requests = {name: (sent, with_credential(sent)) for name, sent in http1_requests().items()}
    rest, rpcs = by_http2(rest_requests()), by_http2(grpc_requests())
    right_1 = http1(OTHER, TOKEN)
    right_2 = http2([*pseudo(OTHER), JSON, BEARER], BODY), ()
    right_rpc = http2([*pseudo(INFER_RPC), *GRPC, BEARER], grpc_body("other")), ()
    async with serving(tmp_path, grpc_transport, http_transport) as here:
        on_rest, on_grpc = over_http1(here.server.rest_port), over_http1(here.server.grpc_port)
        by_h2 = over_http2(here.server.grpc_port)
        routes = [
            (Route("HTTP/1.1", on_rest, right_1), over_1),
            (Route("gRPC", by_h2, right_rpc), rpcs),
        ]
        if grpc_transport == "h2":
            routes.append((Route("HTTP/1.1 on gRPC's port", on_grpc, right_1), over_1))
            routes.append((Route("HTTP/2", by_h2, right_2), rest))
        found = await asyncio.gather(*(route.wrong(here, requests) for route, requests in routes))
        assert not any(found), "\n".join(text for texts in found for text in texts)
        few = {name: rest[name] for name in ("path: as it is", "unload: as it is", "two lengths")}
        h2_on_rest = Route("HTTP/2 on REST's port", over_http2(here.server.rest_port), right_1, on_rest)
        assert not await h2_on_rest.wrong(here, few)
        if grpc_transport == "aio":
            few = {name: over_1[name] for name in ("path: as it is", "h2c", "h2c, then HTTP/2")}
            assert not await Route("HTTP/1.1 on gRPC's port", on_grpc, right_rpc, by_h2).wrong(here, few)
        for route, requests in routes:
            assert len(requests) >= 200
            # Else these requests would show nothing.
            assert await route.served(requests) >= 15, route.name
    assert "rejected a malformed HTTP request" in caplog.text
    audited = (tmp_path / "audit.log").read_text()
    assert len([json.loads(line) for line in audited.splitlines()]) > 150
    # They had one, in the wrong place.
    assert [line for line in [*caplog.messages, *audited.splitlines()] if RIGHT in line] == []


async def end_of(peer: Client, stream: int) -> tuple[str, bytes]:
    """The status of an answer over HTTP/2, of gRPC if it is that, and all that came."""
    status, got = "", b""
    while True:
        frame = await peer.next(frames.HEADERS, frames.DATA)
        got += frame.payload
        if frame.kind == frames.HEADERS:
            fields = peer.fields(frame.payload)
            status = fields.get("grpc-status") or fields.get(":status") or status
        if frame.stream == stream and frame.flags & frames.END_STREAM:
            return status, got


async def token_is_removed(here: ChangingServer, folder: Path) -> None:
    """From now on."""
    write(folder / "access.toml", client("later", ["later"], ["infer"]), anonymous(["health"]))

    async def status() -> int:
        async with here.session.get(f"{here.url}/v2") as answer:
            return answer.status

    await until_found(status, lambda status: status == 401)


@pytest.mark.parametrize(("transport", "is_rest"), [("h2", False), ("h2", True), ("aio", False)])
async def test_the_same_block_again(tmp_path: Path, transport: str, is_rest: bool) -> None:
    first = [*pseudo(INFER), JSON] if is_rest else [*pseudo(INFER_RPC), *GRPC]
    body = BODY if is_rest else grpc_body()
    async with serving(tmp_path, transport, "h1") as here:
        peer = Client(*await asyncio.open_connection(HOST, here.server.grpc_port))
        await peer.greet()
        await peer.send(head(peer, [*first, BEARER]), data(1, body))
        assert (await end_of(peer, 1))[0] == ("200" if is_rest else "0")
        block = peer.block([*first, BEARER])  # Indices only, from now on.
        assert len(block) == len(first) + 1
        for stream in (3, 5):
            await peer.send(frame(frames.HEADERS, frames.END_HEADERS, stream, block), data(stream, body))
            assert has((await end_of(peer, stream))[1], SECRET)
        unauthenticated = "401" if is_rest else "16"
        await peer.send(head(peer, first, stream=7), data(7, body))
        assert (await end_of(peer, 7))[0] == unauthenticated
        await token_is_removed(here, tmp_path)
        for stream in (9, 11):
            await peer.send(frame(frames.HEADERS, frames.END_HEADERS, stream, block), data(stream, body))
            status, got = await end_of(peer, stream)
            assert status == unauthenticated
            assert not has(got, SECRET)
        await peer.close()


@pytest.mark.parametrize(("grpc_transport", "http_transport"), TRANSPORTS)
async def test_the_same_connection_again(tmp_path: Path, grpc_transport: str, http_transport: str) -> None:
    async with serving(tmp_path, grpc_transport, http_transport) as here:
        reader, writer = await asyncio.open_connection(HOST, here.server.rest_port)
        for status, sent in (
            *((b"200", http1(INFER, TOKEN)), (b"401", http1(INFER)), (b"200", http1(INFER, TOKEN))),
            *((b"", b""), (b"401", http1(INFER, TOKEN)), (b"401", http1(INFER, TOKEN))),
        ):
            if not sent:
                await token_is_removed(here, tmp_path)
                continue
            writer.write(sent)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
            assert head[9:12] == status
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            assert has(await reader.readexactly(length), SECRET) is (status == b"200")
        writer.close()
