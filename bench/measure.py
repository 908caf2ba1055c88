"""Measures one round of one server: checks a reply, then loads the server."""

import http.client
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from bench import h2client, httpclient, streamclient
from bench.payloads import BOTH_WAYS, REST, STREAMED, UNARY, Exchange, framed
from bench.scenarios import RAW, Scenario
from bench.servers import Server
from bench.tally import BenchError, LoadConnection, Outcome, Request, close, drive

CALL_LIMIT = 60.0
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one round of one subject."""

    rate: float  # calls per second
    p50: float  # seconds
    p99: float
    cpu: float | None = None  # the server's CPU seconds per call
    client_busy: float = 0.0  # share of its core that the client used
    first: float | None = None  # seconds to the first bytes of a reply, median


@dataclass(slots=True)
class Subject:
    """One of the servers, or one model on a server, that a scenario compares."""

    name: str
    server: Server
    port: int
    exchange: Exchange
    expected: bytes = b""
    """The reply as received; over gRPC with its prefix."""
    requests: Sequence[Request] = ()
    """Requests to send in turn; if empty, the exchange's request is repeated."""
    indexed: bool = False
    """As in `HeaderBlocks`."""
    client: str = RAW
    tls: ssl.SSLContext | None = None


def call_once(subject: Subject) -> bytes:
    """Make one call with an ordinary client, and check the content of the reply, which is returned.

    The load client's replies are compared with it. Raise `BenchError`, with status and text, for an error.
    """
    exchange = subject.exchange
    if exchange.kind != REST:
        return _call_grpc(subject)
    connection = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=CALL_LIMIT)
    try:
        connection.request("POST", exchange.path, exchange.body, exchange.headers)
        reply = connection.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"POST {exchange.path} failed: {error!r}") from error
    finally:
        connection.close()
    if reply.status != 200:
        text = body[:500].decode(errors="replace")
        raise BenchError(f"POST {exchange.path} answered {reply.status} {reply.reason}: {text}")
    exchange.check({name.lower(): value for name, value in reply.headers.items()}, body)
    return body


def _call_grpc(subject: Subject) -> bytes:
    exchange = subject.exchange
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{subject.port}", options) as channel:
        try:
            messages = _messages(channel, exchange)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
            raise BenchError(f"{exchange.path} answered {code}: {details}") from None
    exchange.check({}, framed(messages) if exchange.kind == STREAMED else b"".join(messages))
    return framed(messages)


def _messages(channel: grpc.Channel, exchange: Exchange) -> list[bytes]:
    if exchange.kind == UNARY:
        call = channel.unary_unary(exchange.path)
        return [call(exchange.body, CALL_LIMIT, list(exchange.headers.items()), wait_for_ready=True)]
    if exchange.kind == STREAMED:
        stub = channel.unary_stream(exchange.path)
        return list(stub(exchange.body, timeout=CALL_LIMIT, wait_for_ready=True))
    messages = list(
        channel.stream_stream(exchange.path)(iter([exchange.body]), timeout=CALL_LIMIT, wait_for_ready=True)
    )
    if len(messages) != 1:
        raise BenchError(f"{exchange.path} gave {len(messages)} answers to one request")
    return messages


async def _connect(scenario: Scenario, subject: Subject) -> Sequence[LoadConnection]:
    exchange, in_flight, port = subject.exchange, scenario.in_flight, subject.port
    if exchange.kind == REST:
        request = httpclient.request_bytes(port, exchange.path, exchange.headers, exchange.body)
        return await httpclient.connect(port, subject.requests or [Request(request)], in_flight)
    requests = subject.requests or [Request(exchange.body)]
    if exchange.kind == BOTH_WAYS:
        return [await streamclient.connect(port, exchange.path, requests, in_flight, indexed=subject.indexed)]
    return await h2client.connect(
        port, exchange.path, requests, in_flight, scenario.connections, indexed=subject.indexed, tls=subject.tls
    )


async def load(scenario: Scenario, subject: Subject, settle: float, seconds: float) -> Round:
    """Measure one round on new connections."""
    return await load_on(await _connect(scenario, subject), subject, settle, seconds)


async def load_on(connections: Sequence[LoadConnection], subject: Subject, settle: float, seconds: float) -> Round:
    """Measure one round, after `settle` seconds in which windows and buffers grow; closes the connections."""
    try:
        await drive(connections, settle, subject.expected)
        server_before, client_before = subject.server.cpu_seconds(), time.process_time()
        outcome = await drive(connections, seconds, subject.expected)
        client_used, server_after = time.process_time() - client_before, subject.server.cpu_seconds()
    finally:
        await close(*connections)
    return round_of(outcome, server_before, server_after, client_used)


def round_of(outcome: Outcome, before: float | None, after: float | None, client_used: float) -> Round:
    """Return the results of a run; `before`, `after`: the server's CPU seconds; `client_used`: the client's."""
    p50, p99 = np.percentile(outcome.latencies, (50, 99))
    cpu = None if before is None or after is None else (after - before) / outcome.calls
    rate = outcome.calls / outcome.seconds
    first = float(np.median(outcome.first_bytes)) if outcome.first_bytes else None
    return Round(rate, float(p50), float(p99), cpu, client_used / outcome.seconds, first)
