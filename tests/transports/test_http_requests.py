"""HTTP/1.1 as it is on the wire: paths, bodies in all their forms, and clients that wait before they send one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.scheduling.scripted_models import Inputs, Plain
from tests.transports.live import Live, live
from triglot.transports.rest import decoding
from triglot.transports.rest.routes import MAX_CACHED, MAX_CACHED_LENGTH

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
PATH = "/v2/models/same/infer"
SECONDS = 30
LIMIT = 2 * 1024 * 1024
TINY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[3]}]}'


def same(inputs: Inputs) -> dict[str, Any]:
    return {"y": inputs["x"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"same": Plain(same)}, max_message_size=LIMIT) as server:
        yield server


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """What a 200 has to say, or why it is none."""
        document = json.loads(self.body)
        return str(document["error"]) if "error" in document else ""


class Wire:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, verb: str, path: str, body: bytes = b"", *headers: str) -> None:
        lines = [f"{verb} {path} HTTP/1.1", "Host: localhost", *headers]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def answer(self) -> Answer:
        async with asyncio.timeout(SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(head[0].split(" ")[1]), headers, body)

    async def ask(self, verb: str, path: str, body: bytes = b"", *headers: str) -> Answer:
        self.send(verb, path, body, *headers)
        return await self.answer()


async def wire(server: Live) -> Wire:
    return Wire(*await asyncio.open_connection("127.0.0.1", server.server.rest_port))


def sized(body: bytes) -> str:
    return f"Content-Length: {len(body)}"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def binary(count: int) -> tuple[bytes, list[str]]:
    """A request with so many numbers as binary data, and its headers."""
    values = np.arange(count, dtype=np.float32)
    size = {"binary_data_size": values.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": [count], "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = head + values.tobytes()
    return body, [f"Inference-Header-Content-Length: {len(head)}"]


async def test_a_path_is_found_again_and_again(server: Live) -> None:
    async with await wire(server) as client:
        for _ in range(3):
            assert (await client.ask("POST", PATH, TINY, sized(TINY))).status == 200
            assert (await client.ask("POST", f"{PATH}?a=b/c?d", TINY, sized(TINY))).status == 200
            assert (await client.ask("POST", f"http://h{PATH}", TINY, sized(TINY))).status == 200
            refused = await client.ask("GET", PATH)
            assert (refused.status, refused.headers["allow"]) == (405, "post")
            assert refused.headers["content-type"] == "application/json"
            assert refused.text == "Method Not Allowed"
            unknown = await client.ask("GET", "/v2/nothing")
            assert (unknown.status, unknown.text) == (404, "Not Found")
            assert "allow" not in unknown.headers


async def test_variables_are_those_of_their_own_path(server: Live) -> None:
    async with await wire(server) as client:
        for _ in range(2):
            for name in ("%C3%A9%20%25", "%c3%a9%20%25"):
                answer = await client.ask("GET", f"/v2/models/{name}")
                assert "'é %'" in answer.text
            answer = await client.ask("GET", "/v2/models/same/versions/1")
            assert json.loads(answer.body)["versions"] == ["1"]
            assert (await client.ask("GET", "/v2/models/same/versions/2")).status == 404


async def test_more_paths_than_are_remembered(server: Live) -> None:
    names = [f"m{at}" for at in range(MAX_CACHED + 10)] + ["n" * MAX_CACHED_LENGTH]
    async with await wire(server) as client:
        for name in [*names, names[0], names[-1]]:
            answer = await client.ask("GET", f"/v2/models/{name}")
            assert answer.status == 404
            assert f"'{name}'" in answer.text
        assert (await client.ask("GET", "/v2/models/same")).status == 200


async def test_waiting_client_gets_100_continue(server: Live) -> None:
    async with await wire(server) as client:
        for _ in range(2):
            client.send("POST", PATH, b"", sized(TINY), "Expect: 100-Continue")
            async with asyncio.timeout(SECONDS):
                assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(TINY)
            answer = await client.answer()
            assert (answer.status, answer.text) == (200, "")
        refused = await client.ask("POST", PATH, TINY, sized(TINY), "Expect: more")
        assert (refused.status, refused.text) == (417, "Expectation Failed")


@pytest.mark.parametrize("count", [1, 16_000, 16_400, 300_000])
@pytest.mark.parametrize("step", [0, 1000, 70_000])
async def test_bodies_of_every_size_come_back(server: Live, count: int, step: int) -> None:
    """As one piece, or in pieces with time between them; answers of both sides of what is sent in pieces."""
    body, headers = binary(count)
    async with await wire(server) as client:
        client.send("POST", PATH, b"", sized(body), *headers)
        for at in range(0, len(body), step or len(body)):
            client.writer.write(body[at : at + (step or len(body))])
            if step:
                await client.writer.drain()
                await asyncio.sleep(0)  # The server has a turn.
        answer = await client.answer()
        assert answer.status == 200
        length = int(answer.headers["inference-header-content-length"])
        assert answer.body[length:] == body[-4 * count :]
        # Nothing is left of it on the connection.
        assert (await client.ask("GET", "/v2/health/live")).status == 200


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5000, 1), (5000, 7), (300_000, 65_536)])
async def test_chunked_bodies(server: Live, count: int, size: int) -> None:
    body, headers = binary(count)
    async with await wire(server) as client:
        answer = await client.ask("POST", PATH, chunked(body, size), "Transfer-Encoding: chunked", *headers)
        assert answer.status == 200
        length = int(answer.headers["inference-header-content-length"])
        assert answer.body[length:] == body[-4 * count :]
        assert (await client.ask("GET", "/v2/health/live")).status == 200


async def test_a_body_of_just_the_limit_and_one_byte_more(server: Live) -> None:
    body, headers = binary(LIMIT // 4 - 100)
    text = int(headers[0].split(": ")[1])
    # Blanks within the JSON, so that it is exactly as long as may be.
    exact = b" " * (LIMIT - len(body)) + body
    headers = [f"Inference-Header-Content-Length: {text + LIMIT - len(body)}"]
    refusal = f"the request body is larger than {LIMIT} bytes"
    async with await wire(server) as client:
        assert (await client.ask("POST", PATH, exact, sized(exact), *headers)).status == 200
    async with await wire(server) as client:
        sent = chunked(exact, 50_000)
        assert (await client.ask("POST", PATH, sent, "Transfer-Encoding: chunked", *headers)).status == 200
    async with await wire(server) as client:
        # Its length is enough.
        answer = await client.ask("POST", PATH, b"", sized(exact + b" "), *headers)
        assert answer.status == 413
        assert answer.text.startswith(refusal)
    async with await wire(server) as client:
        sent = chunked(exact + b" ", 50_000)
        answer = await client.ask("POST", PATH, sent, "Transfer-Encoding: chunked", *headers)
        assert answer.status == 413
        assert answer.text.startswith(refusal)


@pytest.mark.parametrize(("path", "limit", "advised"), [(PATH, LIMIT, True), ("/v2/logging", 1024 * 1024, False)])
async def test_the_option_is_named_where_it_is_what_limits(
    server: Live, path: str, limit: int, advised: bool
) -> None:
    async with await wire(server) as client:
        answer = await client.ask("POST", path, b"", sized(bytes(limit + 1)))
        assert answer.status == 413
        assert answer.text.startswith(f"the request body is larger than {limit} bytes")
        assert ("max_message_size" in answer.text) is advised


@pytest.mark.parametrize("broken", [b"zz\r\n", b"2\r\n{}x"])
async def test_a_chunk_that_is_none(server: Live, broken: bytes) -> None:
    async with await wire(server) as client:
        assert (await client.ask("POST", PATH, broken, "Transfer-Encoding: chunked")).status == 400
    async with await wire(server) as client:
        assert (await client.ask("GET", "/v2/health/live")).status == 200


async def test_a_body_that_is_cut_off_is_no_call(server: Live) -> None:
    body, headers = binary(100_000)
    async with await wire(server) as client:
        client.send("POST", PATH, body[:-1], sized(body), *headers)
        client.writer.write_eof()
        async with asyncio.timeout(SECONDS):
            assert b"200 OK" not in await client.reader.read()
    async with await wire(server) as client:
        assert (await client.ask("POST", PATH, TINY, sized(TINY))).status == 200


@pytest.mark.parametrize("way", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_go_on_is_not_waited_for(
    server: Live, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "IDLE_SECONDS", 0.2)
    async with await wire(server) as client, await wire(server) as other:
        client.send("POST", PATH, b"3\r\n{  \r\n", way)
        assert (await other.ask("POST", PATH, TINY, sized(TINY))).status == 200
        answer = await client.answer()
        assert answer.status == 400
        assert re.fullmatch(
            r"the request body is incomplete: \d+ bytes in 0\.\d seconds, expected at least 240 bytes a second "
            r"after 30 seconds, and no pause of 0\.2 seconds",
            answer.text,
        )


async def test_requests_that_come_at_once_are_answered_in_turn(server: Live) -> None:
    bodies = [TINY.replace(b"[3]", b"[%d]" % at) for at in range(20)]
    async with await wire(server) as client:
        for body in bodies:
            client.send("POST", PATH, body, sized(body))
        for at in range(20):
            assert json.loads((await client.answer()).body)["outputs"][0]["data"] == [at]
