"""What is no request of HTTP is refused in the form of every other error (spec 0.3), on both ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from live import Live, live
from scripted_models import Inputs, Plain

from served_models import SECONDS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
HOST = b"Host: localhost\r\n"
GET = b"GET /v2/health/live HTTP/1.1\r\n"
MALFORMED = {
    "an unknown method": (b"FOO /v2 HTTP/1.1\r\n" + HOST, "FOO"),
    "a path that is not encoded": (b"GET /v2/models/\xc3\xa9 HTTP/1.1\r\n" + HOST, "GET /v2/models/"),
    "a header without a colon": (GET + HOST + b"junk\r\n", "junk"),
    "a length that is no number": (GET + HOST + b"Content-Length: five\r\n", "Content-Length"),
}


def same(inputs: Inputs) -> Inputs:
    return {"y": inputs["x"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"same": Plain(same)}, grpc_transport="h2") as server:
        yield server


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("port", ["rest", "grpc"])
async def test_error_is_json(server: Live, port: str, name: str) -> None:
    head, named = MALFORMED[name]
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.server.rest_port if port == "rest" else server.server.grpc_port
    )
    writer.write(head + b"\r\n")
    answer = await asyncio.wait_for(reader.read(), SECONDS)  # The connection is closed: who knows what comes next.
    writer.close()
    lines, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = lines.decode().split("\r\n")
    assert status.split(" ", 1)[1] == "400 Bad Request"
    assert "Content-Type: application/json" in headers
    error = json.loads(body)["error"]
    assert error.startswith("the request is not valid HTTP: ")
    assert named in error
    assert "\n" not in error
    assert len(error) < 300
