"""Comparisons round by round: settings with their rounds, and the rounds' own ratios."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from bench import report, servers
from bench.measure import MODELS, Round, Subject
from bench.report import CLIENT_BOUND
from bench.servers import Checkout, Server
from bench.tally import BenchError

T = TypeVar("T")
BUSY = 0.5
"""Share of a core: a client that uses less of its own waits for the server, even if that uses still less."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Number and length of rounds, from the command line."""

    rounds: int
    seconds: float
    """Length of a round, in seconds."""


@dataclass(slots=True)
class Measured(Generic[T]):
    """The rounds of one setting."""

    setting: T
    rounds: list[Round] = field(default_factory=list)
    peak: int | None = None
    """The server's largest resident size, in bytes."""

    def median(self, value: Callable[[Round], float]) -> float:
        """Return the median over all rounds."""
        return statistics.median(value(run) for run in self.rounds)


def ratios(mine: Measured[T], other: Measured[T]) -> list[float]:
    """Return the ratios of throughput, round by round."""
    return [run.rate / another.rate for run, another in zip(mine.rounds, other.rounds, strict=True)]


def costs(mine: Measured[T], other: Measured[T]) -> list[float]:
    """Return the ratios of CPU time per call, for each round in which it is known."""
    pairs = zip(mine.rounds, other.rounds, strict=True)
    return [pair.cpu / another.cpu for pair, another in pairs if pair.cpu is not None and another.cpu]


def middle(values: Sequence[float]) -> str:
    """Return the median of ratios, as text."""
    return f"{statistics.median(values):.2f}" if values else "n/a"


def span(values: Sequence[float]) -> str:
    """Return the least and the greatest ratio, as text."""
    return f"({min(values):.2f}-{max(values):.2f})" if values else "n/a"


def client_bound(measurement: Measured[T]) -> bool:
    """Return whether the client, not the server, was the limit: used its whole core, or more than the server."""
    busy = measurement.median(lambda mine: mine.client_busy)
    server = measurement.median(lambda mine: (mine.cpu or 1.0) * mine.rate)
    return busy > CLIENT_BOUND or busy > max(server, BUSY)


def row(measurement: Measured[str], first: Measured[str]) -> list[str]:
    """Return a table row: setting, calls/s, ratio to the first line, p50, p99, CPU, its ratio, client's share."""
    rates, busy = ratios(measurement, first), measurement.median(lambda mine: mine.client_busy)
    known = all(mine.cpu is not None for mine in measurement.rounds)
    return [
        measurement.setting,
        f"{measurement.median(lambda mine: mine.rate):,.0f}",
        middle(rates),
        span(rates),
        f"{measurement.median(lambda mine: mine.p50) * 1e3:.3g}",
        f"{measurement.median(lambda mine: mine.p99) * 1e3:.3g}",
        f"{measurement.median(lambda mine: mine.cpu or 0.0) * 1e6:,.0f}" if known else "n/a",
        middle(costs(measurement, first)),
        f"{busy:.0%}{' !' if client_bound(measurement) else ''}",
    ]


async def interleaved(
    subjects: Sequence[Subject], plan: Plan, load: Callable[[Subject, float, float], Awaitable[Round]]
) -> list[Measured[str]]:
    """Measure all subjects in turn, round by round; `load` gets the seconds to settle, and those to measure."""
    measured = [Measured(subject.name) for subject in subjects]
    settle = min(0.5, plan.seconds / 4)
    for number in range(plan.rounds + 1):
        for measurement, subject in zip(measured, subjects, strict=True):
            taken = await load(subject, settle, plan.seconds if number else settle)
            if number:  # The first round is a warm-up.
                measurement.rounds.append(taken)
    return measured


@contextmanager
def serving_models(
    core: int | None,
    flags: Sequence[str] = (),
    checkout: Checkout | None = None,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[tuple[Server, int, int]]:
    """Run `triglot serve` with the bench's models; yields the server, its gRPC port and its REST port."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"  # The log is written to their parent folder.
        models.symlink_to(MODELS)
        with servers.serving(models, core, flags, checkout, environment, python=python) as started:
            yield started


def main(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    what: str,
    in_flight: Sequence[int],
    measure: Callable[[Plan, Sequence[int], int | None], Mapping[int, Sequence[Measured[str]]]],
    lines: Callable[[Sequence[Measured[str]]], Iterator[str]],
    legend: str,
) -> int:
    """Measure with each number of calls in flight, and print; returns 1 after an error, else 0."""
    add_arguments(parser, 5)
    parser.add_argument(
        "--in-flight",
        type=int,
        nargs="+",
        default=list(in_flight),
        help=f"requests in flight (default: {' '.join(map(str, in_flight))})",
    )
    arguments = parser.parse_args(words)
    plan = Plan(arguments.rounds, arguments.seconds)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    described = f"{plan.rounds} rounds of {plan.seconds:g} s; {cores.note}"
    print(*report.machine(), what, described, sep="\n", flush=True)
    try:
        for number, measured in measure(plan, arguments.in_flight, cores.server).items():
            print(f"\n{number} in flight", *lines(measured), sep="\n", flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{legend}")
    return 0


def add_arguments(parser: argparse.ArgumentParser, rounds: int, seconds: float = 1.5) -> None:
    """Add the command-line options of a `Plan`, with these defaults."""
    parser.add_argument("--seconds", type=float, default=seconds, help="length of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each (default: %(default)s)")
