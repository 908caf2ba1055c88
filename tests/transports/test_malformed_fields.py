"""Header fields that gRPC or HTTP do not allow, or that servers could read differently, over all transports."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.served_models import SECONDS, Function, Served, serving, twice
from tests.transports.h2_peers import Client, data, greeting, message, opened, request_fields
from tests.transports.test_h2_rest import BODY, INFER, ONE, answer, client_of, fields
from tests.transports.tls_server import HOST

GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"

# --- grpc-timeout ---

INTERNAL, DEADLINE_EXCEEDED = "13", "4"
TIMEOUTS: dict[str, float | str | None] = {
    "99999999S": 99_999_999.0,
    "999999999S": 999_999_999.0,
    "123456789m": 123_456.789,
    "100000000n": DEADLINE_EXCEEDED,
    "000000000100S": 100.0,
    "1000000000S": 1e9,
    "1000000001S": None,
    "9999999999m": None,
    "99999999999999999999u": None,
    "9" * 5000 + "n": None,
    " 100S": 100.0,
    "100S ": 100.0,
    "100 S": 100.0,
    "0S": DEADLINE_EXCEEDED,
    "100": INTERNAL,
    "": INTERNAL,
    "S": INTERNAL,
    "abc": INTERNAL,
    "-5S": INTERNAL,
    "+5S": INTERNAL,
    "1.5S": INTERNAL,
    "1e2S": INTERNAL,
    "100x": INTERNAL,
    "100SS": INTERNAL,
}
"""The deadline in seconds, None for none, or the status of the call."""


@pytest.mark.parametrize("transport", ["h2", "aio"])
@pytest.mark.parametrize("text", TIMEOUTS, ids=lambda text: repr(text[:24]))
async def test_timeouts_are_read_as_by_c_core(text: str, transport: str) -> None:
    """As over grpc.aio (grpcio 1.85.1, timeout_encoding.cc), whatever the specification says of eight digits."""
    expected = TIMEOUTS[text]
    async with opened(transport) as (rows, port):
        client = Client(*await asyncio.open_connection(HOST, port))
        head = client.raw_headers(1, [(":authority", "a"), *request_fields("Held"), ("grpc-timeout", text)])
        await client.send(greeting(), head, data(1, message(b"1")))
        if isinstance(expected, str):
            assert (await client.status(1))["grpc-status"] == expected
        else:
            await asyncio.wait_for(rows.held.wait(), SECONDS)
            remaining = math.inf if rows.remaining is None else rows.remaining
            assert remaining == pytest.approx(math.inf if expected is None else expected, abs=SECONDS)
            rows.gate.set()
            assert (await client.status(1))["grpc-status"] == "0"
        await client.close()


# --- REST ---


class Ask:
    """Sends requests to REST: over HTTP/1.1 by one of its ports and transports, or over HTTP/2."""

    def __init__(self, here: Served, port: str) -> None:
        self.is_http2 = not port
        self._here, self._port = here, port

    async def __call__(
        self, verb: str, path: str, body: bytes, *given: tuple[str, str], authority: str = "localhost"
    ) -> tuple[int, Any]:
        """Return the status, and the JSON of the answer."""
        length = ("content-length", str(len(body)))
        if self.is_http2:
            async with client_of(self._here.server.grpc_port) as client:
                pseudo = [
                    (name, authority if name == ":authority" else value) for name, value in fields(verb, path)
                ]
                pseudo = [field for field in pseudo if field[1]]
                await client.send(client.raw_headers(1, [*pseudo, length, *given]), data(1, body))
                head, got = await answer(client)
                return int(head[":status"]), json.loads(got)
        reader, writer = await asyncio.open_connection(HOST, getattr(self._here.server, self._port))
        named = [("host", authority)] if authority else []
        lines = "".join(
            f"{name}: {value}\r\n" for name, value in [*named, ("connection", "close"), length, *given]
        )
        writer.write(f"{verb} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        first, _, got = (await asyncio.wait_for(reader.read(), SECONDS)).partition(b"\r\n\r\n")
        writer.close()
        return int(first.split()[1]), json.loads(got)


@pytest_asyncio.fixture(params=["h1 rest_port", "h1 grpc_port", "aiohttp rest_port", "h2"])
async def ask(request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    transport, _, port = request.param.partition(" ")
    chosen = {"http_transport": transport} if port else {}
    async with serving({"twice": Function(twice)}, **ONE, **chosen) as here:
        yield Ask(here, port)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/grpc-web+proto",
        "application/grpc-web-text",
        "application/connect+proto",
        "application/proto",
        "application/json",
        "",
    ],
)
async def test_grpc_web_and_connect_get_415_with_what_is_needed(ask: Ask, content_type: str) -> None:
    given = [("content-type", content_type)] if content_type else []
    status, body = await ask("POST", GRPC_METHOD, b"{}", *given)
    assert status == 415
    assert GRPC_METHOD in body["error"]
    assert (content_type or "no content type") in body["error"]
    assert "POST requests over HTTP/2 of content type application/grpc," in body["error"]


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [
        ("GET", f"{GRPC_METHOD}?connect=v1&encoding=json", 405),
        ("GET", GRPC_METHOD, 405),
        ("POST", "/inference.GRPCInferenceService/NoSuchMethod", 404),
        ("POST", "/tensorflow.serving.PredictionService/Predict", 415),
        ("POST", "/grpc.health.v1.Health/Check", 415),
    ],
)
async def test_other_requests_at_the_paths_of_grpc(ask: Ask, verb: str, path: str, status: int) -> None:
    assert (await ask(verb, path, b"", ("content-type", "application/grpc-web")))[0] == status


HEADER = "inference-header-content-length"


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ([len(BODY)], 200),
        ([len(BODY)] * 2, 200),
        ([len(BODY), 10], 400),
        ([10, len(BODY)], 400),
        ([len(BODY), len(BODY), 0], 400),
        ([f"{len(BODY)}, 10"], 400),
        ([len(BODY), ""], 400),
    ],
    ids=str,
)
async def test_two_lengths_of_the_json_part(ask: Ask, values: list[object], status: int) -> None:
    got, body = await ask("POST", INFER, BODY, *[(HEADER, str(value)) for value in values])
    assert got == status, body
    assert status == 200 or "10" in body["error"] or "''" in body["error"] or "'0'" in body["error"]


@pytest.mark.parametrize(
    ("authority", "hosts", "status"),
    [
        ("localhost", [], 200),
        ("localhost", ["localhost"], 200),
        ("localhost", ["LOCALHOST"], 200),
        ("localhost", ["127.0.0.1"], 400),
        ("localhost", ["localhost:80"], 400),
        ("localhost", ["localhost", "127.0.0.1"], 400),
        ("", ["localhost", "127.0.0.1"], 400),
        ("", ["localhost"], 200),
    ],
)
async def test_hosts_that_differ(ask: Ask, authority: str, hosts: list[str], status: int) -> None:
    if not ask.is_http2 and authority and hosts:
        status = 400  # HTTP/1.1 allows one.
    got, body = await ask("POST", INFER, BODY, *[("host", host) for host in hosts], authority=authority)
    assert got == status, body
    assert status == 200 or "host" in body["error"].lower()


@pytest.mark.parametrize("name", ["content-type", "content-length", "user-agent"])
async def test_fields_that_may_occur_once(ask: Ask, name: str) -> None:
    value = str(len(BODY)) if name == "content-length" else "application/json"
    status, body = await ask("POST", INFER, BODY, *[(name, value)] * 2)
    assert status == 400
    assert "error" in body
