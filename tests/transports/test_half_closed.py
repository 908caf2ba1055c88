"""Clients of REST that close their side of the connection when they have sent their requests."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.scheduling.scripted_models import Plain, Scripted
from tests.transports.h2_peers import SECONDS
from tests.transports.live import Live, live
from tests.transports.test_http_requests import TINY, sized
from tests.waiting import until

pytestmark = [pytest.mark.both_transports, pytest.mark.both_event_loops]

CLIENTS = 200
INFER = "/v2/models/scripted/infer"


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Live]:
    models = {"scripted": Scripted(open_gate=False), "same": Plain(lambda inputs: {"y": inputs["x"]})}
    async with live(models, grpc_transport="h2") as here:
        yield here
        models["scripted"].open_point("infer")  # type: ignore[attr-defined]


def scripted(here: Live) -> Scripted:
    model = here.models["scripted"]
    assert isinstance(model, Scripted)
    return model


def post(path: str, *lines: str, version: str = "1.1", body: bytes = TINY) -> bytes:
    return (
        "\r\n".join([f"POST {path} HTTP/{version}", "Host: localhost", sized(TINY), *lines, "", ""]).encode()
        + body
    )


async def half_closed(here: Live, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
    writer.write(sent)
    writer.write_eof()
    return reader, writer


def connections(here: Live) -> int:
    http = here.server._http
    assert http is not None
    return http.count_connections()


async def received(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All that comes until the server closes the connection, which it does."""
    got = await asyncio.wait_for(reader.read(), SECONDS)
    writer.close()
    return got


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", [INFER, "/v2/models/same/infer"])
async def test_many_get_their_answers(here: Live, path: str, version: str) -> None:
    clients = [await half_closed(here, post(path, version=version)) for _ in range(CLIENTS)]
    scripted(here).open_point("infer")
    for client in clients:
        got = await received(*client)
        assert got.count(b"200 OK") == got.count(b'"outputs"') == 1
    await until(lambda: not connections(here))


async def test_every_request_of_a_pipeline_is_answered(here: Live) -> None:
    client = await half_closed(here, post(INFER) + post("/v2/models/same/infer") + post("/v2/nothing"))
    await scripted(here).until_at("infer")
    scripted(here).open_point("infer")
    got = await received(*client)
    assert (got.count(b"200 OK"), got.count(b"404 Not Found")) == (2, 1)
    await until(lambda: not connections(here))


async def test_who_has_left_is_cancelled(here: Live) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
    writer.write(post(INFER))
    await scripted(here).until_at("infer")
    writer.close()
    await until(lambda: scripted(here).calls[0].cancelled)
    await until(lambda: not connections(here))


async def test_who_half_closes_and_leaves_later_is_cancelled(here: Live) -> None:
    reader, writer = await half_closed(here, post(INFER))
    await scripted(here).until_at("infer")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert not scripted(here).calls[0].cancelled
    linger = struct.pack("ii", 1, 0)  # It is reset.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    await until(lambda: scripted(here).calls[0].cancelled)
    await until(lambda: not connections(here))


@pytest.mark.parametrize("sent", [b"", b"POST /v2", post(INFER, body=b""), post(INFER, body=TINY[:-1])])
async def test_who_has_sent_no_whole_request_is_let_go(here: Live, sent: bytes) -> None:
    got = await received(*await half_closed(here, sent))
    assert b"200 OK" not in got
    await until(lambda: not connections(here))
