"""Runs one scenario: starts its servers, checks one reply of each, then loads them in turn, round by round."""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import uvloop

from bench import native, rounds, servers, stockclient, triton
from bench.measure import Round, Subject, call_once, load
from bench.payloads import REST, Exchange, tensor
from bench.rounds import Measured
from bench.scenarios import CPP, KEEP_MEMORY, RAW, Launch, Line, Scenario
from bench.servers import Checkout, Server
from bench.tally import BenchError
from bench.traffic import exchanges, requests
from triglot.config.options import Config

CANNED = ("grpc", "rest")
"""Kinds of `bench.bare` that send the same reply to every request."""
CORES_TO_SHARE = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings from the command line."""

    rounds: int
    seconds: float  # length of a round
    core: int | None  # where the servers run
    all_cores: frozenset[int] = frozenset()
    """The cores for servers that share them with the client; empty if nothing is pinned."""
    aa: bool = False  # a second server like the first one, in place of the others
    against: Checkout | None = None
    """Another checkout: the lines of triglot are then measured in pairs, with this server and with that one."""


def lines_of(scenario: Scenario, against: Checkout | None = None) -> tuple[list[Line], list[str]]:
    """Return the lines that can be measured here, and why others cannot; pairs of them as in `Settings`."""
    if scenario.needs and scenario.needs not in {option.name for option in fields(Config)}:
        return [], [f"this server has no option {scenario.needs}"]
    if scenario.shared_cores and (os.cpu_count() or 1) < CORES_TO_SHARE:
        return [], [f"it takes {CORES_TO_SHARE} cores"]
    lines, reasons = [], []
    for line in scenario.lines:
        why = (triton.left_out() if line.launch.triton else "") or (
            native.left_out() if line.client == CPP else ""
        )
        if why:
            reasons.append(why)
        else:
            lines.append(line)
    if against is not None:
        lines, reasons = list(_pairs(lines, against)), ["no line is of our server with options that both know"]
    return lines, list(dict.fromkeys(reasons))


def _pairs(lines: Sequence[Line], other: Checkout) -> Iterator[Line]:
    """Yield each line of triglot, and its pair with the other checkout, if that has all of the line's options."""
    known = other.options()
    for line in lines:
        launch = line.launch
        if launch.ours and known.issuperset(flag for flag in launch.flags if flag.startswith("--")):
            other_launch = replace(launch, name=f"{launch.name}, {other.path}", checkout=other)
            yield line
            yield replace(line, name=f"{line.name}, {other.path}", launch=other_launch)


def compare(scenario: Scenario, settings: Settings) -> list[Measured[str]]:
    """Run a scenario; returns the measurements of each line, of which the first is the baseline."""
    lines, _ = lines_of(scenario, settings.against)
    if settings.aa:
        lines = [lines[0], replace(lines[0], name="the same again")]
    return measure(scenario, lines, settings)


def measure(scenario: Scenario, lines: Sequence[Line], settings: Settings) -> list[Measured[str]]:
    """Return the measurements of these lines."""
    measured: list[Measured[str]] = [Measured(line.name) for line in lines]
    with servers.on_cores(settings.all_cores if scenario.shared_cores else frozenset()):
        if scenario.starts:
            for _ in range(settings.rounds * scenario.starts):
                _run(scenario, lines, measured, replace(settings, rounds=1))
        else:
            _run(scenario, lines, measured, settings)
    return measured


def _run(scenario: Scenario, lines: Sequence[Line], measured: Sequence[Measured[str]], settings: Settings) -> None:
    """Measure some rounds with the same servers."""
    with contextlib.ExitStack() as stack:
        subjects = list(_subjects(stack, scenario, lines, settings))
        for subject in subjects:
            with _named(scenario, subject, under_load=False):
                subject.expected = call_once(subject)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # uvloop costs the client less.
            runner.run(_rounds(scenario, subjects, measured, settings))
        for measurement, subject in zip(measured, subjects, strict=True):
            measurement.peak = max(measurement.peak or 0, subject.server.peak_bytes() or 0) or None


async def _rounds(
    scenario: Scenario, subjects: Sequence[Subject], measured: Sequence[Measured[str]], settings: Settings
) -> None:
    seconds = settings.seconds
    settle = min(0.5, seconds / 4)
    turns = list(zip(subjects, measured, strict=True))
    for number in range(settings.rounds + 1):
        turns.reverse()  # So that no line always follows the same other one.
        for subject, line in turns:
            with _named(scenario, subject, under_load=True):
                taken = await _load(scenario, subject, settle, seconds if number else settle)
            if number:  # The first round is a warm-up.
                line.rounds.append(taken)


async def _load(scenario: Scenario, subject: Subject, settle: float, seconds: float) -> Round:
    if subject.client == RAW:
        return await load(scenario, subject, settle, seconds)
    by = native.load if subject.client == CPP else stockclient.load
    return await by(subject, scenario.in_flight, settle, seconds, scenario.connections)


@contextlib.contextmanager
def _named(scenario: Scenario, subject: Subject, *, under_load: bool) -> Iterator[None]:
    """Add to errors the scenario, the subject, and the state and output of its server."""
    try:
        yield
    except (BenchError, OSError) as error:
        server = subject.server
        state = "is still running" if server.alive() else f"ended with {server.process.returncode}"
        text = f"{scenario.name}, {subject.name}: {error}\n"
        if under_load and server.alive():
            text += f"an ordinary client, asking after that: {_ask_again(subject)}\n"
        text += f"the server {state}; the last lines of its output:\n{server.tail()}"
        raise BenchError(text) from error


def _ask_again(subject: Subject) -> str:
    """Return a lasting error's status and text, by an ordinary client: the load client cannot read a status."""
    try:
        call_once(subject)
    except BenchError as error:
        return str(error)
    return "all is well"


def _subjects(
    stack: contextlib.ExitStack, scenario: Scenario, lines: Sequence[Line], settings: Settings
) -> Iterator[Subject]:
    """Yield a subject for each line; the servers run until the stack ends."""
    core = None if scenario.shared_cores else settings.core
    running: dict[str, tuple[Server, int, int]] = {}
    for line in lines:
        launch, making = line.launch, line.exchange or scenario.exchange
        traffic = scenario.traffic and (line.traffic or scenario.traffic)
        made: Sequence[Exchange] = (
            exchanges(making, line.models, scenario.elements, traffic)
            if traffic
            else [making(line.model, tensor(scenario.rows, scenario.elements), "")]
        )
        # With `aa`, two equal lines have a server each, which shows how much equal servers differ.
        key = f"{launch.name}, {line.name}" if settings.aa else launch.name
        if key not in running:
            running[key] = stack.enter_context(_started(launch, made[0], core))
        server, grpc_port, rest_port = running[key]
        port = rest_port if made[0].kind == REST else grpc_port
        subject = Subject(line.name, server, port, made[0], client=line.client)
        if traffic:
            canned = made[0].reply if launch.bare in CANNED else b""
            subject.requests, subject.indexed = requests(made, traffic, port, canned), traffic.indexed
        yield subject


def _started(
    launch: Launch, exchange: Exchange, core: int | None
) -> AbstractContextManager[tuple[Server, int, int]]:
    if launch.bare:
        environment = KEEP_MEMORY if launch.keep_memory else {}
        return servers.bare(launch.bare, exchange, core, launch.flags, environment, launch.python)
    if launch.triton:
        return triton.serving(core)
    return rounds.serving_models(core, launch.flags, launch.checkout, python=launch.python)
