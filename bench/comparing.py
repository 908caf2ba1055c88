"""One scenario: start what is compared, look at one reply of each, then load them in turn, round by round."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import uvloop

from bench import rounds, servers
from bench.measure import Subject, call_once, load
from bench.payloads import REST, tensor
from bench.rounds import Measured
from bench.scenarios import KEEP_MEMORY, Line, Scenario
from bench.servers import Server
from bench.tally import BenchError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person who started the bench chose."""

    rounds: int
    seconds: float  # length of a round
    core: int | None  # where the servers run
    all_cores: frozenset[int] = frozenset()
    """For what shares them with the client; none where nothing is pinned."""
    aa: bool = False  # a second server like the first one, in place of the others


def compare(scenario: Scenario, settings: Settings) -> list[Measured[str]]:
    """Run a scenario; the first line is the baseline of the others."""
    lines = scenario.lines
    if settings.aa:
        lines = (lines[0], replace(lines[0], name="the same again"))
    measured: list[Measured[str]] = [Measured(line.name) for line in lines]
    with servers.on_cores(settings.all_cores if scenario.shared_cores else frozenset()):
        if scenario.starts:
            for _ in range(settings.rounds * scenario.starts):
                _run(scenario, lines, measured, replace(settings, rounds=1))
        else:
            _run(scenario, lines, measured, settings)
    return measured


def _run(scenario: Scenario, lines: Sequence[Line], measured: Sequence[Measured[str]], settings: Settings) -> None:
    """Some rounds with the same servers."""
    with contextlib.ExitStack() as stack:
        subjects = list(_subjects(stack, scenario, lines, settings))
        for subject in subjects:
            with _named(scenario, subject, under_load=False):
                subject.expected = call_once(subject)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # The client's cheaper one.
            runner.run(_rounds(scenario, subjects, measured, settings))
        for one, subject in zip(measured, subjects, strict=True):
            one.peak = max(one.peak or 0, subject.server.peak_bytes() or 0) or None


async def _rounds(
    scenario: Scenario, subjects: Sequence[Subject], measured: Sequence[Measured[str]], settings: Settings
) -> None:
    seconds = settings.seconds
    settle = min(0.5, seconds / 4)
    for number in range(settings.rounds + 1):
        for subject, one in zip(subjects, measured, strict=True):
            with _named(scenario, subject, under_load=True):
                taken = await load(scenario, subject, settle, seconds if number else settle)
            if number:  # The first round finds a cold start.
                one.rounds.append(taken)


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
            text += f"an ordinary client, asking after that: {_ask_again(subject)}\n"
        text += f"the server {state}; the last lines of its output:\n{server.tail()}"
        raise BenchError(text) from error


def _ask_again(subject: Subject) -> str:
    """The load client cannot read a status: an error that lasts shows it to an ordinary client."""
    try:
        call_once(subject)
    except BenchError as error:
        return str(error)
    return "all is well"


def _subjects(
    stack: contextlib.ExitStack, scenario: Scenario, lines: Sequence[Line], settings: Settings
) -> Iterator[Subject]:
    """The lines, with their servers up until the stack ends."""
    values = tensor(scenario.rows, scenario.elements)
    core = None if scenario.shared_cores else settings.core
    running: dict[str, tuple[Server, int, int]] = {}
    for line in lines:
        launch = line.launch
        exchange = (line.exchange or scenario.exchange)(line.model, values)
        # Two lines of the same name are for two servers: that is what shows how much equal ones differ.
        key = f"{launch.name}, {line.name}" if settings.aa else launch.name
        if key not in running:
            if launch.bare:
                environment = KEEP_MEMORY if launch.keep_memory else {}
                started = servers.bare(launch.bare, exchange, core, launch.flags, environment)
            else:
                started = rounds.serving_models(core, launch.flags)
            running[key] = stack.enter_context(started)
        server, grpc_port, rest_port = running[key]
        yield Subject(line.name, server, rest_port if exchange.kind == REST else grpc_port, exchange)
