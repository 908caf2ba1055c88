"""REST over HTTP/2: requests that are no gRPC calls, answered by the same rows."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.served_models import Gated, Served, serving
from tests.transports.h2_peers import SECONDS, Client, classified, data, greeting
from tests.transports.rest_routes import any_path, rest_server
from tests.transports.tls_server import HOST, server
from tests.waiting import until
from triglot.config.options import Config
from triglot.core.http import HttpRequest
from triglot.telemetry.store import Telemetry
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import read_head
from triglot.transports.http2.rest import rest_fields
from triglot.transports.http2.server import H2Server

ONE: dict[str, Any] = {"grpc_transport": "h2", "rest_port": 0}
INFER = "/v2/models/twice/infer"
BODY = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1],"data":[21]}]}'


def fields(method: str, path: str, *others: tuple[str, str]) -> list[tuple[str, str]]:
    return [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost"), *others]


@asynccontextmanager
async def client_of(port: int, **settings: int) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection(HOST, port))
    await client.send(greeting(**settings))
    yield client
    await client.close()


async def answer(client: Client, stream: int = 1) -> tuple[dict[str, str], bytes]:
    """The head and the body of an answer; what it takes is given back."""
    head: dict[str, str] = {}
    body = b""
    while True:
        got = await client.next(frames.HEADERS, frames.DATA, frames.RST_STREAM, frames.GOAWAY)
        assert got.kind not in (frames.RST_STREAM, frames.GOAWAY), got.code
        if got.kind == frames.HEADERS:
            fields_of = client.fields(got.payload)
            if got.stream == stream:
                head = fields_of
        elif got.stream == stream:
            body += got.payload
            if got.payload:
                count = len(got.payload)
                await client.send(frames.window_update(0, count), frames.window_update(stream, count))
        if got.stream == stream and got.flags & frames.END_STREAM:
            return head, body


async def test_a_request_without_a_body() -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        flags = frames.END_HEADERS | frames.END_STREAM
        await client.send(client.raw_headers(1, fields("GET", "/v2/health/ready"), flags))
        head, body = await answer(client)
        assert (head[":status"], head["content-type"]) == ("200", "application/json")
        assert head.keys().isdisjoint({"connection", "transfer-encoding", "keep-alive"})
        assert int(head["content-length"]) == len(body)
        await client.send(client.raw_headers(3, fields("GET", "/none"), flags))
        assert (await answer(client, 3))[0][":status"] == "404"


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunks"])
@pytest.mark.parametrize("size", [1, 7, len(BODY)])
async def test_a_body_in_parts(length: bool, size: int) -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        headers = [("content-length", str(len(BODY)))] if length else []
        await client.send(client.raw_headers(1, fields("POST", INFER, *headers)))
        for at in range(0, len(BODY), size):
            await client.send(data(1, BODY[at : at + size], end=at + size >= len(BODY)))
        head, body = await answer(client)
        assert (head[":status"], json.loads(body)["outputs"][0]["data"]) == ("200", [42])


async def test_many_rest_calls_during_grpc_calls() -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        flags = frames.END_HEADERS | frames.END_STREAM
        for stream in range(1, 41, 2):
            await client.send(client.raw_headers(stream, fields("GET", "/v2"), flags))
        await client.send(client.headers(41, "/inference.GRPCInferenceService/ServerLive"), data(41, b"\0" * 5))
        finished: dict[int, int] = {}
        while len(finished) < 21:
            got = await client.next(frames.HEADERS, frames.DATA)
            if got.kind == frames.HEADERS:
                fields_of = client.fields(got.payload)
                assert fields_of.get(":status", "200") == "200"
                assert fields_of.get("grpc-status", "0") == "0"
            if got.flags & frames.END_STREAM:
                finished[got.stream] = 1
        assert set(finished) == set(range(1, 43, 2))


async def test_large_both_ways_through_small_windows() -> None:
    values = list(range(100_000))
    text = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [len(values)], "data": values}]})
    async with server(**ONE) as here, client_of(here.grpc_port, initial_window_size=20_000) as client:
        await client.send(client.raw_headers(1, fields("POST", INFER)))

        async def send() -> None:
            left = memoryview(text.encode())
            while left:
                await client.send(data(1, bytes(left[:10_000]), end=len(left) <= 10_000))
                left = left[10_000:]

        sending = asyncio.create_task(send())
        head, body = await answer(client)
        await sending
        assert head[":status"] == "200"
        assert json.loads(body)["outputs"][0]["data"] == [2 * value for value in values]


async def test_a_compressed_answer_and_a_page() -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        headers = [("accept", "text/html"), ("accept-encoding", "gzip"), ("cookie", "a=1"), ("cookie", "b=2")]
        flags = frames.END_HEADERS | frames.END_STREAM
        await client.send(client.raw_headers(1, fields("GET", "/", *headers), flags))
        head, body = await answer(client)
        assert head[":status"] == "200"
        text = gzip.decompress(body) if head.get("content-encoding") == "gzip" else body
        assert b"<html" in text


async def test_head_and_other_methods() -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        flags = frames.END_HEADERS | frames.END_STREAM
        for stream, method in ((1, "HEAD"), (3, "DELETE"), (5, "OPTIONS")):
            await client.send(client.raw_headers(stream, fields(method, "/v2/health/live"), flags))
            head, body = await answer(client, stream)
            assert int(head[":status"]) < 500
            assert method != "HEAD" or not body


# --- requests that are wrong ---


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/a b"), ("GET", "no"), ("get it", "/"), ("GET", "/\x7f"), ("G\tT", "/")]
)
async def test_what_http1_cannot_say(method: str, path: str) -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        flags = frames.END_HEADERS | frames.END_STREAM
        await client.send(client.raw_headers(1, fields(method, path), flags))
        assert (await answer(client))[0][":status"] == "400"


async def test_no_second_request_is_smuggled_in_a_body() -> None:
    async with serving({"twice": (model := Gated())}, **ONE) as here:
        model.open_point("infer")
        async with client_of(here.server.grpc_port) as client:
            hidden = b"POST " + INFER.encode() + b" HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
            headers = ("content-length", "2")
            await client.send(client.raw_headers(1, fields("POST", "/v2", headers)))
            await client.send(data(1, b"{}", end=False), data(1, hidden))
            got = await client.next(frames.HEADERS, frames.RST_STREAM)
            assert got.kind == frames.RST_STREAM or client.fields(got.payload)[":status"] in ("400", "405")
            await client.send(frames.ping(b"12345678"))
            await client.next(frames.PING)
            assert not model.calls
            # Nor by a head that says two lengths.
            two = [("content-length", "2"), ("content-length", str(len(BODY)))]
            await client.send(client.raw_headers(3, fields("POST", "/v2", *two)), data(3, b"{}" + hidden))
            await client.next(frames.HEADERS, frames.RST_STREAM)
            assert not model.calls


async def test_a_body_that_ends_too_early() -> None:
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        await client.send(client.raw_headers(1, fields("POST", INFER, ("content-length", "100"))), data(1, b"{}"))
        assert (await client.next(frames.RST_STREAM)).code is frames.ErrorCode.PROTOCOL_ERROR
        flags = frames.END_HEADERS | frames.END_STREAM
        await client.send(client.raw_headers(3, fields("GET", "/v2"), flags))
        assert (await answer(client, 3))[0][":status"] == "200"


async def test_a_body_that_is_too_large() -> None:
    async with (
        server(**ONE, max_message_size=1000) as here,
        client_of(here.grpc_port) as client,
    ):
        await client.send(client.raw_headers(1, fields("POST", INFER)), data(1, b"x" * 2000, end=False))
        assert (await answer(client))[0][":status"] == "413"


# --- ends ---


@asynccontextmanager
async def held(**options: Any) -> AsyncIterator[tuple[Served, Gated, Client]]:
    """A REST call over HTTP/2 that runs."""
    model = Gated()
    async with serving({"twice": model}, **ONE, **options) as here, client_of(here.server.grpc_port) as client:
        await client.send(client.raw_headers(1, fields("POST", INFER)), data(1, BODY))
        await model.until_at("infer")
        try:
            yield here, model, client
        finally:
            model.open_point("infer")


async def test_a_client_that_leaves() -> None:
    async with held() as (here, model, client):
        await client.send(frames.rst_stream(1, frames.ErrorCode.CANCEL))
        await until(lambda: model.calls[0].cancelled)
        model.open_point("infer")
        await here.is_idle()


async def test_a_running_call_is_answered_when_the_server_stops() -> None:
    async with held(grace=float(SECONDS)) as (here, model, client):
        stopping = asyncio.create_task(here.server.stop())
        await client.next(frames.GOAWAY)
        model.open_point("infer")
        head, body = await answer_after_goaway(client)
        assert (head[":status"], json.loads(body)["outputs"][0]["data"]) == ("200", [21])
        await client.close()
        await asyncio.wait_for(stopping, SECONDS)


async def answer_after_goaway(client: Client) -> tuple[dict[str, str], bytes]:
    head: dict[str, str] = {}
    body = b""
    while True:
        got = await client.next(frames.HEADERS, frames.DATA)
        if got.kind == frames.HEADERS:
            head = client.fields(got.payload)
        else:
            body += got.payload
        if got.flags & frames.END_STREAM:
            return head, body


async def test_a_call_that_outlives_the_grace_period() -> None:
    async with held(grace=0.1) as (here, model, client):
        stopping = asyncio.create_task(here.server.stop())
        head, _ = await answer_after_goaway(client)
        assert head[":status"] == "503"
        model.open_point("infer")
        await client.close()
        await asyncio.wait_for(stopping, SECONDS)


def test_the_fields_of_a_request() -> None:
    head = read_head(
        classified(
            [
                (b":method", b"POST"),
                (b":scheme", b"https"),
                (b":path", b"/v2?x=1"),
                (b":authority", b"a.b:1"),
                (b"host", b"other"),
                (b"content-type", b"application/json"),
                (b"cookie", b"a=1"),
                (b"cookie", b"b=2"),
                (b"te", b"trailers"),
                (b"content-length", b"2"),
            ]
        )
    )
    assert rest_fields(head) == [
        ("host", "a.b:1"),
        ("content-type", "application/json"),
        ("content-length", "2"),
        ("cookie", "a=1; b=2"),
    ]


async def test_handlers_of_rest_that_run_on_after_a_reset_are_bounded() -> None:
    begun: list[str] = []
    finished: list[str] = []
    gate = asyncio.Event()

    async def stubborn(request: HttpRequest) -> None:
        begun.append(request.target)
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await gate.wait()
        finished.append(request.target)

    rest = rest_server(any_path(stubborn))
    config = Config(grpc_port=0, rest_port=-1)
    h2 = H2Server([], config, Telemetry(), Limits(max_reset_running=3), rest=rest)
    port = await h2.start()
    try:
        async with client_of(port) as client:
            for at in range(1, 21, 2):
                await client.send(
                    client.raw_headers(at, fields("GET", f"/{at}"), frames.END_HEADERS | frames.END_STREAM)
                )
                await client.wait_until_processed()
                await client.send(frames.rst_stream(at, frames.ErrorCode.CANCEL))
                await client.wait_until_processed()
            assert begun == ["/1", "/3", "/5"]
            gate.set()
            await until(lambda: len(finished) == 3)
            await client.wait_until_processed()
            await client.send(client.raw_headers(21, fields("GET", "/21"), frames.END_HEADERS | frames.END_STREAM))
            assert (await answer(client, 21))[0][":status"] == "200"
    finally:
        gate.set()
        await h2.stop()
