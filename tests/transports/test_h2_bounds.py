"""Queued data of connections is bounded, on every transport and however it came."""

from __future__ import annotations

import gzip
from collections import Counter
from typing import Any

from h2_peers import data, greeted, message, served
from test_h2_rest import BODY, INFER, ONE, client_of, fields
from tls_server import server

from triglot.transports.http2.body import MAX_UNREAD_BYTES
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.server import H2Server
from waiting import until

MIB = 1024 * 1024
RESOURCE_EXHAUSTED = "8"


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
