"""gRPC over our HTTP/2, as a client sees it that reads every frame, and as gRPC's own client does."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from contextlib import suppress
from urllib.parse import unquote

import grpc
import grpc.aio
import pytest

from tests.transports.h2_peers import SECONDS, Served, data, frame, greeted, message, served
from triglot.transports.http2.body import MAX_UNREAD_BYTES
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import DEFAULTS, Limits

pytestmark = pytest.mark.both_event_loops

END_BOTH = frames.END_HEADERS | frames.END_STREAM


async def status_of(
    here: Served, name: str, body: bytes, *fields: tuple[str, str], headers: list[tuple[str, str]] | None = None
) -> dict[str, str]:
    """The last fields of a call's answer."""
    client = await greeted(here)
    if headers is None:
        await client.send(client.headers(1, name, *fields), data(1, body))
    else:
        await client.send(client.raw_headers(1, headers), data(1, body))
    status = await client.status(1)
    await client.close()
    return status


@pytest.mark.parametrize(
    ("body", "fields", "code", "text"),
    [
        (b"", (), "12", "got none"),
        (message(b"1") + message(b"2"), (), "12", "got several"),
        (message(b"1")[:3], (), "13", "within a message"),
        (message(b"1", size=2), (), "13", "within a message"),
        (message(b"1", packed=2), (), "13", "compressed flag is 2"),
        (message(bytes(101)), (), "8", "larger than max (101 vs. 100)"),
        (message(b"", size=2**32 - 1), (), "8", "larger than max"),
        (message(b"1", packed=1), (), "13", "grpc-encoding names no algorithm"),
        (message(b"1", packed=1), (("grpc-encoding", "br"),), "12", "'br' is not supported"),
        (message(b"no gzip at all", packed=1), (("grpc-encoding", "gzip"),), "13", "cannot be decompressed"),
        (message(gzip.compress(b"1", mtime=0)[:-1], packed=1), (("grpc-encoding", "gzip"),), "13", "is truncated"),
        (
            message(gzip.compress(b"1", mtime=0) + b"x", packed=1),
            (("grpc-encoding", "gzip"),),
            "13",
            "has data after its end",
        ),
        (
            message(gzip.compress(bytes(101), mtime=0), packed=1),
            (("grpc-encoding", "gzip"),),
            "8",
            "larger than max (101",
        ),
        (message(b"1"), (("grpc-timeout", "1x"),), "13", "grpc-timeout"),
        (message(b"1"), (("grpc-timeout", "1.5S"),), "13", "grpc-timeout"),
        (message(b"1"), (("a-bin", "?"),), "13", "a-bin: expected base64"),
    ],
)
async def test_what_is_wrong_with_a_call_is_its_status(
    body: bytes, fields: tuple[tuple[str, str], ...], code: str, text: str
) -> None:
    async with served(max_message_size=100) as here:
        status = await status_of(here, "Echo", body, *fields)
        assert status["grpc-status"] == code
        assert text in unquote(status["grpc-message"])
        assert status.get("grpc-accept-encoding", "identity,deflate,gzip") == "identity,deflate,gzip"
        assert here.server.open_calls == here.server.request_bytes.held == 0


@pytest.mark.parametrize("size", [0, 1, 4, 5])
@pytest.mark.parametrize("heads_first", [False, True])
async def test_a_body_too_short_for_a_message_ends_its_call_alone(size: int, heads_first: bool) -> None:
    async with served() as here:
        client = await greeted(here)
        bodies = {1: message(b"1"), 3: message(b"1"), 5: message(b"1")[:size], 7: message(b"1")}
        heads = [client.headers(stream, "Echo") for stream in bodies]
        ends = [data(stream, body) for stream, body in bodies.items()]
        pairs = zip(heads, ends, strict=True)
        await client.send(*(heads + ends if heads_first else [part for pair in pairs for part in pair]))
        statuses: dict[int, str] = {}
        while len(statuses) < len(bodies):
            got = await client.next(frames.HEADERS)
            trailers = client.fields(got.payload)
            if got.flags & frames.END_STREAM:
                statuses[got.stream] = trailers["grpc-status"]
        assert statuses == {1: "0", 3: "0", 5: "12" if size == 0 else "13", 7: "0"}
        await client.close()


@pytest.mark.parametrize("most", ["calls", "streams"])
async def test_no_more_are_open_than_may_be(most: str) -> None:
    async with served(max_connections=2) if most == "calls" else served(Limits(max_streams=2)) as here:
        client = await greeted(here)
        # The third time the bytes of the head are known, and the request is one event.
        for number in (1, 3, 5):
            await client.send(client.headers(number, "Held"), data(number, message(b"1")))
        if most == "calls":
            assert (await client.status(5))["grpc-status"] == "8"
        else:
            refused = await client.next(frames.RST_STREAM)
            assert (refused.stream, refused.code) == (5, ErrorCode.REFUSED_STREAM)
        here.rows.gate.set()
        assert [(await client.status(number))["grpc-status"] for number in (1, 3)] == ["0", "0"]
        await client.send(client.headers(7, "Held"), data(7, message(b"1")))
        assert (await client.status(7))["grpc-status"] == "0"
        await client.close()


@pytest.mark.parametrize("wrong", [0, 1])
async def test_a_length_is_kept_by_calls_that_look_alike(wrong: int) -> None:
    async with served() as here:
        client = await greeted(here)
        body = message(b"1")
        length = ("content-length", str(len(body)))
        await client.send(*(client.headers(stream, "Echo", length) + data(stream, body) for stream in (1, 3, 5)))
        for stream in (1, 3, 5):
            assert (await client.status(stream))["grpc-status"] == "0"
        await client.send(client.headers(7, "Echo", length), data(7, body + bytes(wrong)))
        got = await client.next(frames.RST_STREAM if wrong else frames.HEADERS)
        assert got.stream == 7
        await client.close()


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        (":method", "GET", "405"),
        ("content-type", "application/json", "415"),
        ("content-type", "application/grpc-web", "415"),
    ],
)
async def test_what_is_no_grpc_call_gets_an_http_status(field: str, value: str, status: str) -> None:
    async with served() as here:
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/t.T/Echo",
            "content-type": "application/grpc",
            field: value,
        }
        client = await greeted(here)
        await client.send(client.raw_headers(1, list(headers.items())), data(1, message(b"1")))
        assert client.fields((await client.next(frames.HEADERS)).payload)[":status"] == status
        error = json.loads((await client.next(frames.DATA)).payload)["error"]
        assert "application/grpc" in error
        assert (value if status == "415" else "a GET request") in error
        await client.send(client.headers(3, "Echo"), data(3, message(b"1")))
        assert (await client.status(3))["grpc-status"] == "0"
        await client.close()


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto", "application/grpc;a=b"])
async def test_a_grpc_content_type_may_say_more(content_type: str) -> None:
    async with served() as here:
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/t.T/Echo"),
            ("content-type", content_type),
        ]
        assert (await status_of(here, "", message(b"1"), headers=headers))["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("gzip", gzip.compress(b"text" * 100, mtime=0)), ("deflate", zlib.compress(b"text" * 100))],
)
async def test_compressed_requests(encoding: str, packed: bytes) -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(
            client.headers(1, "Echo", ("grpc-encoding", encoding)), data(1, message(packed, packed=1))
        )
        await client.next(frames.HEADERS)
        assert (await client.next(frames.DATA)).payload == message(b"text" * 100)
        await client.close()


@pytest.mark.parametrize(("length", "wrong"), [("6", False), ("7", True), ("x", True)])
async def test_declared_length_is_enforced(length: str, wrong: bool) -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "Echo", ("content-length", length)), data(1, message(b"1")))
        got = await client.next(frames.RST_STREAM, frames.DATA)
        assert (got.kind == frames.RST_STREAM) is wrong
        await client.close()


async def test_metadata() -> None:
    async with served() as here:
        fields = (("a-bin", "AAEC,Aw=="), ("b", "x, y"), ("c-bin", "AA"))
        assert (await status_of(here, "Echo", message(b""), *fields))["grpc-status"] == "0"
        assert here.rows.metadata == {"a-bin": b"\x03", "b": "x, y", "c-bin": b"\0"} | {
            key: value for key, value in here.rows.metadata.items() if key not in ("a-bin", "b", "c-bin")
        }


async def test_an_error_is_only_trailers_and_its_text_arrives() -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "Wrong"), data(1, message(b"")))
        first = await client.next(frames.HEADERS)
        assert first.flags & frames.END_STREAM
        fields = client.fields(first.payload)
        assert fields["grpc-status"] == "5"
        assert fields["grpc-message"] == "100 %25 of %C3%BCn%C3%AFcode%0Ain two lines"
        await client.close()
        async with here.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t.T/Wrong")(b"", timeout=SECONDS)
            assert caught.value.details() == "100 % of ünïcode\nin two lines"


async def test_an_early_answer_resets_a_stream_that_still_sends() -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "/no/such"), data(1, message(b"", size=100), end=False))
        assert (await client.status(1))["grpc-status"] == "12"
        assert (await client.next(frames.RST_STREAM)).code is ErrorCode.NO_ERROR
        # What was on its way does no harm, trailers neither.
        await client.send(data(1, bytes(100), end=False), frame(frames.HEADERS, END_BOTH, 1, b"\x00\x01a\x01b"))
        await client.send(client.headers(3, "Echo"), data(3, message(b"")))
        assert (await client.status(3))["grpc-status"] == "0"
        await client.close()


async def test_refused_streams_end_in_any_way() -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "/no/such"))
        assert (await client.status(1))["grpc-status"] == "12"
        await client.send(client.headers(3, "/no/such"), data(3, message(bytes(100))))
        assert (await client.status(3))["grpc-status"] == "12"
        await client.send(client.headers(5, "/no/such"), frames.rst_stream(5, ErrorCode.CANCEL))
        await client.send(client.headers(7, "Echo"), data(7, message(b"")))
        assert (await client.status(7))["grpc-status"] == "0"
        await client.send(*(client.headers(number, "/no/such") for number in range(9, 409, 2)))
        answered = 0
        while answered < 200:
            got = await client.next(frames.HEADERS)
            answered += client.fields(got.payload)["grpc-status"] == "12"
        await client.send(client.headers(409, "/no/such"))
        await client.close()


@pytest.mark.parametrize("half_closed", [True, False])
async def test_stock_client_gets_the_status_of_a_refused_stream(half_closed: bool) -> None:
    """It tells its caller INTERNAL in place of a status that comes while it writes."""
    async with served() as here, here.channel() as channel:
        call = channel.stream_stream("/no/such")

        async def code() -> grpc.StatusCode:
            stream = call(timeout=SECONDS)
            with suppress(grpc.aio.AioRpcError):  # The status is there already.
                await stream.write(b"1")
                if half_closed:
                    await stream.done_writing()
            return await stream.code()

        for _ in range(20):
            codes = await asyncio.gather(*(code() for _ in range(10)))
            assert codes == [grpc.StatusCode.UNIMPLEMENTED] * 10


async def test_a_deadline_ends_the_call_for_a_client_that_only_waits() -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "Held", ("grpc-timeout", "1m")), data(1, message(b"")))
        assert (await client.status(1))["grpc-status"] == "4"
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        await client.close()


async def test_a_deadline_resets_an_answer_that_is_not_taken() -> None:
    async with served() as here:
        client = await greeted(here, initial_window_size=0)
        await client.send(client.headers(1, "Count", ("grpc-timeout", "200m")), data(1, message(b"1")))
        await client.next(frames.HEADERS)
        reset = await client.next(frames.RST_STREAM, frames.HEADERS)
        assert reset.kind == frames.RST_STREAM
        assert reset.code is ErrorCode.CANCEL
        await client.close()


@pytest.mark.parametrize("leave", ["reset", "close"])
async def test_who_leaves_ends_the_call(leave: str) -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "Held"), data(1, message(b"")))
        await asyncio.wait_for(here.rows.held.wait(), SECONDS)
        if leave == "reset":
            await client.send(frames.rst_stream(1, ErrorCode.CANCEL))
        else:
            await client.close()
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        assert here.server.open_calls == 0
        await client.close()


async def test_a_slow_reader_holds_the_generator() -> None:
    async with served() as here:
        client = await greeted(here, initial_window_size=100)
        await client.send(client.headers(1, "Count"), data(1, message(bytes(95))))
        await client.next(frames.DATA)
        await client.send(frames.ping(bytes(8)))
        await client.next(frames.PING)
        assert here.rows.call_count == 2  # One has left, one waits.
        await client.send(frames.window_update(1, 100))
        assert len((await client.next(frames.DATA)).payload) == 100
        await client.send(frames.ping(bytes(8)))
        await client.next(frames.PING)
        assert here.rows.call_count == 3
        await client.close()


async def test_a_window_that_shrinks_below_zero() -> None:
    async with served() as here:
        client = await greeted(here, initial_window_size=100)
        await client.send(client.headers(1, "Echo"), data(1, message(bytes(195))))
        assert len((await client.next(frames.DATA)).payload) == 100
        setting = frames.Setting.INITIAL_WINDOW_SIZE
        await client.send(frames.settings({setting: 20}), frames.window_update(1, 80), frames.ping(bytes(8)))
        got = await client.next(frames.DATA, frames.PING)
        assert got.kind == frames.PING  # The window is at zero again, and no data came.
        await client.send(frames.window_update(1, 30))
        assert len((await client.next(frames.DATA)).payload) == 30
        await client.send(frames.settings({setting: 1000}))
        assert len((await client.next(frames.DATA)).payload) == 70
        assert (await client.status(1))["grpc-status"] == "0"
        await client.close()


async def test_an_unread_stream_closes_its_window_and_no_other() -> None:
    async with served() as here:
        client = await greeted(here)
        large_message = message(bytes(99_995))
        await client.send(client.headers(1, "Both"), *(data(1, large_message, end=False) for _ in range(10)))
        await client.send(client.headers(3, "Echo"), data(3, message(b"1")))
        assert (await client.status(3))["grpc-status"] == "0"
        # Beyond what is given, it is the stream's fault alone.
        too_many = (MAX_UNREAD_BYTES + DEFAULTS.stream_window) // len(large_message) + 1
        await client.send(*(data(1, large_message, end=False) for _ in range(too_many)))
        assert (await client.next(frames.RST_STREAM)).code is ErrorCode.FLOW_CONTROL_ERROR
        await client.send(client.headers(5, "Echo"), data(5, message(b"1")))
        assert (await client.status(5))["grpc-status"] == "0"
        assert here.server.request_bytes.held == 0
        await client.close()
