"""What is no request of HTTP is answered in the form of every other error (spec 0.3), on both ports."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.scheduling.scripted_models import Plain
from tests.served_models import SECONDS
from tests.transports.live import Live, live
from triglot.core.call import Call
from triglot.core.http import HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.rows import Route
from triglot.transports.rest.exchange import error_response

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
HOST = b"Host: localhost\r\n"
GET = b"GET /v2/health/live HTTP/1.1\r\n"
MALFORMED = {
    "an unknown method": (b"FOO /v2 HTTP/1.1\r\n" + HOST, "FOO"),
    "a path that is not encoded": (b"GET /v2/models/\xc3\xa9 HTTP/1.1\r\n" + HOST, "GET /v2/models/"),
    "a header without a colon": (GET + HOST + b"junk\r\n", "junk"),
    "a length that is no number": (GET + HOST + b"Content-Length: five\r\n", "Content-Length"),
}
RUBBISH = {
    "a long header": GET + HOST + b"X: " + b"a" * 100_000,
    "a long path": b"GET /" + b"a" * 200_000,
    "two lengths": b"POST / HTTP/1.1\r\nHost: 0.0.0.0\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"same": Plain(lambda inputs: {"y": inputs["x"]})}, grpc_transport="h2") as server:
        yield server


async def answer(server: Live, sent: bytes, port: str = "rest_port") -> bytes:
    """All bytes until the server closes the connection, as it cannot know where a request begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", getattr(server.server, port))
    writer.write(sent)
    got = await asyncio.wait_for(reader.read(), SECONDS)
    writer.close()
    return got


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("port", ["rest_port", "grpc_port"])
async def test_error_is_json(server: Live, port: str, name: str) -> None:
    head, named = MALFORMED[name]
    lines, _, body = (await answer(server, head + b"\r\n", port)).partition(b"\r\n\r\n")
    status, *headers = lines.decode().split("\r\n")
    assert status.split(" ", 1)[1] == "400 Bad Request"
    assert "Content-Type: application/json" in headers
    error = json.loads(body)["error"]
    assert error.startswith("the request is not valid HTTP: ")
    assert named in error
    assert "\n" not in error
    assert len(error) < 300


@pytest.mark.parametrize("name", RUBBISH)
async def test_rubbish_is_a_line_in_the_log(server: Live, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            # aiohttp 3.10 takes a long path that comes in pieces, and the head is too large then.
            assert (await answer(server, RUBBISH[name])).split(b" ", 2)[1] in (b"400", b"414", b"431")
    assert b" 200 OK" in await answer(server, GET + HOST + b"Connection: close\r\n\r\n")
    assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []
    lines = [text for text in caplog.messages if "rejected a malformed HTTP request" in text]
    assert all("\n" not in text and len(text) < 300 for text in lines)
    assert len(lines) == 3 or name == "TLS"  # Newer versions of aiohttp have their debug log for this.


@pytest.mark.parametrize(("name", "shown"), [("", "POST /v1/models/{model}:{verb}"), ("Predict", "POST Predict")])
async def test_a_failure_inside_a_route_names_it_without_its_pattern(name: str, shown: str) -> None:
    async def call(_: Any, __: Call) -> None:
        pass

    path = "/v1/models/{model:[^/:]+}:{verb:(?i:predict)}"
    route = Route("POST", path, Operation.INFER, lambda _: None, call, lambda *_: HttpResponse(b""), name=name)
    answer = error_response(route, KeyError("ours"), {}, Call())
    assert answer.status == 500
    assert isinstance(answer.body, bytes)
    assert json.loads(answer.body)["error"].startswith(f"{shown} failed, error ")
