"""What one connection, and all of them, can have the server hold is bounded."""

from __future__ import annotations

import asyncio
import gzip
import socket
import tracemalloc
from collections import Counter
from itertools import chain
from typing import Any

from hpack import Encoder

from tests.transports.h2_peers import SECONDS, classified, data, frame, greeted, message, request_fields, served
from tests.transports.rest_routes import any_path, rest_server
from tests.transports.test_h2_rest import BODY, INFER, ONE, client_of, fields
from tests.transports.tls_server import server
from tests.waiting import until
from triglot.config.options import Config
from triglot.core.http import HttpRequest
from triglot.telemetry.store import Telemetry
from triglot.transports.http2.body import MAX_UNREAD_BYTES, SMALL_HELD_BYTES
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.hpack import Decoder
from triglot.transports.http2.core.limits import DEFAULTS, MAX_FIELDS_BYTES, MAX_HEADER_BYTES, Limits
from triglot.transports.http2.core.receiving import CALL_BYTES, read_head
from triglot.transports.http2.core.sending import Sender, response_head, trailers
from triglot.transports.http2.messages import PREFIX
from triglot.transports.http2.protocol import H2Protocol
from triglot.transports.http2.server import H2Server

RESOURCE_EXHAUSTED = "8"
ENTRY = 3900
"""Bytes of a table's only entry."""


def test_what_is_kept_of_header_blocks_is_bounded() -> None:
    """Connections share fields and beginnings of blocks; what others sent is forgotten."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(3000):
        decoder = Decoder()
        value = b"%04d" % number + bytes(b"x" * (ENTRY - 4))
        decoder.decode(b"\x40\x01a\x7f" + encoded_length(ENTRY - 127) + value)
        request = b"\x83\x86\x84" + b"\xbe" * (number % 3 + 1)  # POST, http, /, and the entry.
        assert read_head(*decoder.decode(request)).fields[-1].value == value
        assert read_head(*decoder.decode(request + b"\x00\x01b\x00")).fields[-2].value == value
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1500 * ENTRY


def encoded_length(rest: int) -> bytes:
    """The bytes behind the prefix of an HPACK integer of two more bytes."""
    return bytes((rest & 0x7F | 0x80, rest >> 7))


def test_what_is_announced_of_header_lists() -> None:
    block = Encoder().encode([*request_fields("Echo"), ("a", "x" * 100)])
    received = (*chain(*Decoder().decode(block)),)
    assert sum(field.size for field in received) == sum(
        32 + len(name) + len(value) for name, value in [*request_fields("Echo"), ("a", "x" * 100)]
    )
    head = read_head(received)
    assert head.call_bytes > CALL_BYTES
    large = [*((name.encode(), value.encode()) for name, value in request_fields("Echo"))]
    large += [(b"a", b"x" * 100)] * (MAX_HEADER_BYTES // 133 + 1)
    refused = read_head(classified(large))
    assert refused.too_large
    assert not refused.read_metadata()


def test_a_thousand_connections_hold_less_than_a_mib_each() -> None:
    idle_bytes = 80 * 1024  # As measured.
    assert DEFAULTS.max_open_in_all / 1000 + DEFAULTS.fair_open + CALL_BYTES + idle_bytes < 2**20


async def test_open_calls_are_bounded_in_all() -> None:
    most = 20 * CALL_BYTES
    async with served(Limits(max_open_in_all=most, fair_open=2 * CALL_BYTES)) as here, here.channel() as channel:
        client = await greeted(here)
        large = ("a", "x" * (MAX_HEADER_BYTES // 2))
        numbers = range(1, 101, 2)
        await client.send(*(client.headers(number, "Held", large) for number in numbers))
        await client.wait_until_processed()
        calls = here.server.open_calls
        assert 2 < calls < 20
        assert most < here.server.open_bytes < 2 * most
        await client.send(client.headers(101, "Held"))
        refused = await client.status(101)
        assert refused["grpc-status"] == RESOURCE_EXHAUSTED
        assert "in-flight calls hold more than" in refused["grpc-message"]
        assert refused["grpc-retry-pushback-ms"] == "1000"
        # Who has few calls is served.
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        await client.send(*(frames.rst_stream(number, frames.ErrorCode.CANCEL) for number in numbers))
        await until(lambda: here.server.open_bytes == 0)
        assert here.server.open_calls == 0
        await client.close()


def test_what_small_answers_take_that_wait_for_a_window() -> None:
    count = 1000
    sender = Sender(lambda _: None, lambda _: None)
    sender.set_initial_window(0)
    for number in range(count):
        sender.begin(number)
    tracemalloc.start()
    try:
        for number in range(count):
            body = [PREFIX.pack(False, 4), b"%04d" % number]
            sender.respond(number, response_head(), body, 9, trailers(0, ""))
        sender.take()
        assert tracemalloc.get_traced_memory()[0] < 700 * count
    finally:
        tracemalloc.stop()
    assert sender.unsent == 9 * count


async def test_nothing_is_made_for_a_request_of_rest_that_is_refused() -> None:
    gate = asyncio.Event()

    begun: list[str] = []

    async def held(request: HttpRequest) -> None:
        begun.append(request.target)
        await gate.wait()

    limits = Limits(max_open_in_all=2 * CALL_BYTES, fair_open=CALL_BYTES)
    h2 = H2Server([], Config(grpc_port=0, rest_port=-1), Telemetry(), limits, rest=rest_server(any_path(held)))
    port = await h2.start()
    try:
        async with client_of(port) as client:
            for number in range(1, 21, 2):
                await client.send(client.raw_headers(number, fields("GET", "/v2"), 5))
            for number in range(5, 21, 2):
                refused = await client.next(frames.HEADERS)
                assert (refused.stream, client.fields(refused.payload)[":status"]) == (number, "503")
            assert len(begun) == 2
            gate.set()
            assert client.fields((await client.next(frames.HEADERS)).payload)[":status"] == "200"
    finally:
        gate.set()
        await h2.stop()


async def test_fields_of_rest_are_bounded() -> None:
    large = ("a", "x" * MAX_FIELDS_BYTES)
    async with server(**ONE) as here, client_of(here.grpc_port) as client:
        await client.send(client.raw_headers(1, fields("GET", "/v2/health/ready", large), 5))
        assert client.fields((await client.next(frames.HEADERS)).payload)[":status"] == "431"
        await client.send(client.raw_headers(3, fields("GET", "/v2/health/ready"), 5))
        assert client.fields((await client.next(frames.HEADERS)).payload)[":status"] == "200"


async def test_who_reads_nothing_is_not_read_from() -> None:
    """And gets everything once it reads."""
    limits = Limits(max_unread=10_000, abuse_budget=1e9)  # Many of its streams are refused, too.
    async with served(limits) as here:
        client = await greeted(here)
        await client.wait_until_processed()
        (connection,) = here.server.connections
        assert isinstance(connection, H2Protocol)
        transport: Any = client.writer.transport
        transport.pause_reading()
        assert connection._transport is not None
        for endpoint, option in ((transport, socket.SO_RCVBUF), (connection._transport, socket.SO_SNDBUF)):
            endpoint.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 16_384)
        await client.send(client.headers(1, "/no"))
        block = client.headers(3, "/no")[frames.HEAD_BYTES :]  # Indices alone: the same for all others.
        sent, enough = 1, False

        async def send() -> None:
            nonlocal sent
            while not enough:
                numbers = range(2 * sent + 1, 2 * sent + 2001, 2)
                sent += 1000
                await client.send(*(frame(frames.HEADERS, 5, number, block) for number in numbers))
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        await until(lambda: connection.reading_paused)
        # What had come already was answered, too.
        assert len(connection._buffered) < limits.max_unread + 1_000_000
        enough = True
        transport.resume_reading()
        finished: set[int] = set()
        while len(finished) < sent:  # With a status, or refused: more came at once than may be open.
            finished.add((await client.next(frames.HEADERS, frames.RST_STREAM)).stream)
        await asyncio.wait_for(sending, SECONDS)
        await client.wait_until_processed()
        assert not connection.reading_paused
        await client.close()


async def test_many_small_requests_of_a_stream_count_as_what_they_take() -> None:
    count = 1000
    async with served(max_total_queue_bytes=2 * SMALL_HELD_BYTES, max_queue_bytes=0) as here:
        client = await greeted(here)
        await client.send(client.headers(1, "Both"), frame(frames.DATA, 0, 1, message(b"ab") * 100))
        await client.wait_until_processed()
        assert 100 * 60 < here.server.request_bytes.held < 100 * 80
        await client.send(data(1, message(b"ab") * count, end=False))
        refused = await client.status(1)
        assert refused["grpc-status"] == RESOURCE_EXHAUSTED
        assert here.server.request_bytes.held == 0
        await client.close()


MIB = 1024 * 1024


async def test_a_large_request_behind_a_small_one_that_waits() -> None:
    async with served(max_total_queue_bytes=100_000, max_queue_bytes=0) as here, here.channel() as channel:
        client = await greeted(here)
        part = message(bytes(MAX_UNREAD_BYTES + 1), size=2 * MAX_UNREAD_BYTES)
        await client.send(client.headers(1, "Both"), data(1, message(b"small"), end=False))
        await client.wait_until_processed()
        for at in range(0, len(part), 16_000):
            await client.send(data(1, part[at : at + 16_000], end=False))
        refused = await client.status(1)
        assert refused["grpc-status"] == RESOURCE_EXHAUSTED
        assert "request buffer limit of 100000 bytes reached" in refused["grpc-message"]
        assert here.server.request_bytes.held == 0
        assert await channel.unary_unary("/t.T/Echo")(b"1") == b"1"
        await client.close()


async def test_requests_that_are_small_only_as_long_as_they_are_compressed() -> None:
    async with served(max_total_queue_bytes=100_000, max_queue_bytes=0) as here, here.channel() as channel:
        here.rows.gate.set()
        client = await greeted(here, initial_window_size=0)  # The handler waits with each request.
        await client.send(
            client.headers(1, "Both", ("grpc-encoding", "gzip")),
            data(1, message(gzip.compress(bytes(90_000)), packed=1), end=False),
            client.headers(3, "Both", ("grpc-encoding", "gzip")),
            data(3, message(gzip.compress(bytes(2 * MAX_UNREAD_BYTES)), packed=1), end=False),
        )
        refused = await client.status(3)
        assert refused["grpc-status"] == RESOURCE_EXHAUSTED
        await until(lambda: here.server.request_bytes.held == 90_000)
        assert await channel.unary_unary("/t.T/Echo")(b"1") == b"1"
        await client.send(frames.rst_stream(1, frames.ErrorCode.CANCEL))
        await until(lambda: here.server.request_bytes.held == 0)
        await client.close()


async def test_calls_of_a_client_that_does_not_read() -> None:
    """Those that come when as many answers wait as may are refused, all that came in one packet."""
    count, first = 200, 80
    async with served(Limits(max_unsent=4 * MIB)) as here:
        client = await greeted(here, initial_window_size=frames.LARGEST_WINDOW)
        await client.send(frames.window_update(0, frames.LARGEST_WINDOW - 65_535))
        await client.wait_until_processed()
        transport: Any = client.writer.transport
        transport.pause_reading()
        numbers = range(1, 2 * count, 2)
        calls = [client.headers(at, "Large") + data(at, message(str(MIB).encode())) for at in numbers]
        await client.send(*calls[:first])
        await until(lambda: here.rows.made == first)
        await client.send(*calls[first:])
        transport.resume_reading()
        statuses: Counter[str] = Counter()
        while statuses.total() < count:
            got = await client.next(frames.HEADERS)
            if "grpc-status" in (trailers := client.fields(got.payload)):
                statuses[trailers["grpc-status"]] += 1
        assert here.rows.made == first
        assert statuses == {"0": first, RESOURCE_EXHAUSTED: count - first}
        await client.close()


async def test_unread_rest_responses() -> None:
    async with server(**ONE) as here:
        h2 = here._grpc
        assert isinstance(h2, H2Server)
        # They are no options.
        h2.limits = Limits(max_unsent_in_all=1000, fair_unsent=0)
        length = ("content-length", str(len(BODY)))
        statuses: Counter[str] = Counter()
        async with (
            client_of(here.grpc_port, initial_window_size=0) as first,
            client_of(here.grpc_port, initial_window_size=0) as other,
        ):
            for number in range(1, 41, 2):
                for client in (first, other):
                    await client.send(
                        client.raw_headers(number, fields("POST", INFER, length)), data(number, BODY)
                    )
                    statuses[client.fields((await client.next(frames.HEADERS)).payload)[":status"]] += 1
        # Each answer is larger than what one of the clients may have of all.
        assert statuses.keys() == {"200", "503"}
        assert statuses["200"] <= 20
