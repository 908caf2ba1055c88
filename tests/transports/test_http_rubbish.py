"""Clients that send the REST port what is not HTTP: an answer, a line in the log, and no error of the server's."""

from __future__ import annotations

import asyncio
import logging

import pytest
from live import live
from scripted_models import Inputs, Plain

from served_models import SECONDS

pytestmark = pytest.mark.both_transports

RUBBISH = {
    "a long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000,
    "a long path": b"GET /" + b"a" * 200_000,
    "two lengths": b"POST / HTTP/1.1\r\nHost: 0.0.0.0\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
}


def same(inputs: Inputs) -> Inputs:
    return {"y": inputs["x"]}


@pytest.mark.parametrize("name", RUBBISH)
async def test_it_is_answered_and_no_error(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with live({"same": Plain(same)}) as here:
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
                writer.write(RUBBISH[name])
                answer = await asyncio.wait_for(reader.read(), SECONDS)
                # aiohttp 3.10 takes a long path that comes in pieces, and the head is too large then.
                assert answer.split(b" ", 2)[1] in (b"400", b"414", b"431")
                writer.close()
        async with here.session.get(f"{here.url}/health/live") as response:
            assert response.status == 200
    assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []
    lines = [text for text in caplog.messages if "rejected a malformed HTTP request" in text]
    assert all("\n" not in text and len(text) < 300 for text in lines)
    assert len(lines) == 3 or name == "TLS"  # Newer versions of aiohttp have their debug log for this.
