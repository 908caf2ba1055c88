"""One scenario: start what is compared, look at one reply of each, then load them in turn, round by round."""

import asyncio
import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from bench import h2client, httpclient, servers
from bench.payloads import Exchange, framed, tensor
from bench.scenarios import Bare, Scenario
from bench.servers import Server
from bench.tally import BenchError, LoadConnection, Outcome, drive

CALL_LIMIT = 60.0
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person who started the bench chose."""

    rounds: int
    seconds: float  # length of a round
    core: int | None  # where the servers run
    aa: bool  # a second bare server in place of ours


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one subject."""

    rate: float  # calls per second
    p50: float  # seconds
    p99: float
    cpu: float | None = None  # the server's CPU seconds per call
    client_busy: float = 0.0  # share of its core that the client used
    first: float | None = None  # seconds to the first bytes of a reply, median


@dataclass(slots=True)
class Subject:
    """One of the servers, or one model on it, that a scenario compares."""

    name: str
    server: Server
    port: int
    exchange: Exchange
    expected: bytes = b""
    rounds: list[Round] = field(default_factory=list)
    peak: int | None = None


def call_once(scenario: Scenario, subject: Subject) -> bytes:
    """The reply as an ordinary client gets it, checked for its meaning.

    It is what the load client's replies are held against, and where errors have their status and text.
    """
    if scenario.grpc:
        return _call_grpc(subject)
    exchange = subject.exchange
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
    streams = exchange.messages > 1
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{subject.port}", options) as channel:
        try:
            stub = channel.unary_stream(exchange.path) if streams else channel.unary_unary(exchange.path)
            reply = stub(exchange.body, timeout=CALL_LIMIT, wait_for_ready=True)
            messages: list[bytes] = list(reply) if streams else [reply]
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
            raise BenchError(f"{exchange.path} answered {code}: {details}") from None
    exchange.check({}, framed(messages) if streams else messages[0])
    return framed(messages)


async def _connect(scenario: Scenario, subject: Subject) -> Sequence[LoadConnection]:
    exchange = subject.exchange
    if scenario.grpc:
        return await h2client.connect(subject.port, exchange.path, exchange.body, scenario.in_flight)
    request = httpclient.request_bytes(subject.port, exchange.path, exchange.headers, exchange.body)
    return await httpclient.connect(subject.port, request, scenario.in_flight)


async def load(scenario: Scenario, subject: Subject, settle: float, seconds: float) -> Round:
    """One round on fresh connections."""
    return await load_on(await _connect(scenario, subject), subject, settle, seconds)


async def load_on(connections: Sequence[LoadConnection], subject: Subject, settle: float, seconds: float) -> Round:
    """One round: settle, so that windows and buffers have their size, then measure; closes the connections."""
    try:
        await drive(connections, settle, subject.expected)
        server_before, client_before = subject.server.cpu_seconds(), time.process_time()
        outcome = await drive(connections, seconds, subject.expected)
        client_used, server_after = time.process_time() - client_before, subject.server.cpu_seconds()
    finally:
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)  # lets the transports close their sockets
    return _round(outcome, server_before, server_after, client_used)


def _round(outcome: Outcome, before: float | None, after: float | None, client_used: float) -> Round:
    p50, p99 = np.percentile(outcome.latencies, (50, 99))
    cpu = None if before is None or after is None else (after - before) / outcome.calls
    rate = outcome.calls / outcome.seconds
    first = float(np.median(outcome.first_bytes)) if outcome.first_bytes else None
    return Round(rate, float(p50), float(p99), cpu, client_used / outcome.seconds, first)


def measure(scenario: Scenario, settings: Settings) -> list[Subject]:
    """Run a scenario; the first subject is the baseline of the others."""
    with contextlib.ExitStack() as stack:
        subjects = _start_all(stack, scenario, settings)
        for subject in subjects:
            with _named(scenario, subject, under_load=False):
                subject.expected = call_once(scenario, subject)
        asyncio.run(_rounds(scenario, subjects, settings))
        for subject in subjects:
            subject.peak = subject.server.peak_bytes()
    return subjects


async def _rounds(scenario: Scenario, subjects: Sequence[Subject], settings: Settings) -> None:
    settle = min(0.5, settings.seconds / 4)
    for subject in subjects:  # a round that does not count, to find a cold start there
        with _named(scenario, subject, under_load=True):
            await load(scenario, subject, settle, settle)
    for _ in range(settings.rounds):
        for subject in subjects:
            with _named(scenario, subject, under_load=True):
                subject.rounds.append(await load(scenario, subject, settle, settings.seconds))


@contextlib.contextmanager
def _named(scenario: Scenario, subject: Subject, *, under_load: bool) -> Iterator[None]:
    """Say in an error whose it is, and what that server has to say."""
    try:
        yield
    except (BenchError, OSError) as error:
        server = subject.server
        state = "is still running" if server.alive() else f"ended with {server.process.returncode}"
        text = f"{scenario.name}, {subject.name}: {error}\n"
        if under_load and server.alive():
            text += f"an ordinary client, asking after that: {_ask_again(scenario, subject)}\n"
        text += f"the server {state}; the last lines of its output:\n{server.tail()}"
        raise BenchError(text) from error


def _ask_again(scenario: Scenario, subject: Subject) -> str:
    """The load client cannot read a status: an error that lasts shows it to an ordinary client."""
    try:
        call_once(scenario, subject)
    except BenchError as error:
        return str(error)
    return "all is well"


def _start_all(stack: contextlib.ExitStack, scenario: Scenario, settings: Settings) -> list[Subject]:
    """All servers of a scenario, up until the scenario ends."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triglot-bench-")))

    def run(
        name: str,
        command: Sequence[str],
        ready: Callable[[], bool],
        environment: Mapping[str, str],
    ) -> Server:
        words = [sys.executable, "-m", *command]
        log = folder / f"{name}.log"
        started = servers.started(name, words, ready, core=settings.core, log=log, environment=environment)
        return stack.enter_context(started)

    def bare(name: str, which: Bare) -> Subject:
        port = servers.free_port()
        command = ["bench.bare", which.kind, "--port", str(port), "--reply", str(reply)]
        command += ["--headers", json.dumps(canned.reply_headers), "--messages", str(canned.messages)]
        server = run(name, command, lambda: servers.accepts(port), which.environment)
        return Subject(name, server, port, canned)

    values = tensor(scenario.rows, scenario.elements)
    canned = scenario.exchange(scenario.models[0], values)
    reply = folder / "reply"
    reply.write_bytes(canned.reply)
    subjects = [bare(which.name, which) for which in scenario.bare]
    if settings.aa:
        return [*subjects, bare("the same again", scenario.bare[0])]
    grpc_port, rest_port = servers.free_port(), servers.free_port()
    command = ["triglot", "serve", str(MODELS)]
    command += ["--grpc-port", str(grpc_port), "--rest-port", str(rest_port)]
    ours = run("triglot", command, lambda: servers.answers_ready(rest_port), {})
    port = grpc_port if scenario.grpc else rest_port
    models = [
        Subject(f"triglot {model}", ours, port, scenario.exchange(model, values)) for model in scenario.models
    ]
    return subjects + models
