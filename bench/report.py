"""Medians over rounds, as a table."""

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from bench.measure import Round, Subject
from bench.scenarios import Scenario
from bench.servers import ROOT

COLUMNS = (
    "server",
    "{what}s/s",
    "x bare",
    "(min-max)",
    "p50 ms",
    "p99 ms",
    "first ms",
    "server CPU µs/{what}",
    "x bare",
    "peak MiB",
    "client busy",
)
CLIENT_BOUND = 0.9
LEGEND = f"""\
Medians over rounds; the servers of a scenario are loaded in turn, one at a time, round by round. "x bare" is
the median of the rounds' own ratios to the first line (and, in brackets, their range), so a machine that
speeds up or slows down between rounds does not enter. Calls/s: more is better; CPU per call: less is better.
"First ms" is the median time to the first bytes of a reply (gRPC only), p50 and p99 are of whole streams.
CPU covers user and kernel time of all threads and child processes. Peak memory is the server's since its
start, all models of the scenario together. "client busy" is the share of one core that the load client used;
above {CLIENT_BOUND:.0%}, marked with !, the client was the limit: calls/s and latency are then the client's,
and CPU per call is the figure to compare. "Memory kept" is a bare server whose malloc (glibc's) does not give
freed memory back to the kernel: with large messages, two equal bare servers without that differ by a factor
of up to two, by chance, from start to start."""


def columns(scenario: Scenario) -> list[str]:
    """The header: of calls, or of a stream's messages."""
    what = "message" if scenario.messages > 1 else "call"
    return [column.format(what=what) for column in COLUMNS]


def rows(scenario: Scenario, subjects: Sequence[Subject]) -> list[list[str]]:
    """One line per subject, the first one being the baseline."""
    return [_row(subject, subjects[0], scenario.messages) for subject in subjects]


def _row(subject: Subject, baseline: Subject, messages: int) -> list[str]:
    def median(value: Callable[[Round], float]) -> float:
        return statistics.median(value(one) for one in subject.rounds)

    pairs = list(zip(subject.rounds, baseline.rounds, strict=True))
    rates = [mine.rate / bare.rate for mine, bare in pairs]
    costs = [mine.cpu / bare.cpu for mine, bare in pairs if mine.cpu is not None and bare.cpu]
    cpu = [one.cpu for one in subject.rounds if one.cpu is not None]
    firsts = [one.first for one in subject.rounds if one.first is not None]
    busy = median(lambda one: one.client_busy)
    rate = median(lambda one: one.rate) * messages
    return [
        subject.name,
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}",
        f"{statistics.median(rates):.2f}",
        f"({min(rates):.2f}-{max(rates):.2f})",
        f"{median(lambda one: one.p50) * 1e3:.3g}",
        f"{median(lambda one: one.p99) * 1e3:.3g}",
        f"{statistics.median(firsts) * 1e3:.3g}" if firsts else "n/a",
        f"{statistics.median(cpu) / messages * 1e6:,.0f}" if cpu else "n/a",
        f"{statistics.median(costs):.2f}" if costs else "n/a",
        f"{subject.peak / 2**20:,.0f}" if subject.peak is not None else "n/a",
        f"{busy:.0%}{' !' if busy > CLIENT_BOUND else ''}",
    ]


def plain(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join(line(cells).rstrip() for cells in (header, *lines))


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The same table for a page."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def machine() -> list[str]:
    """Where and with what the figures were made, one line each."""
    packages = ("grpcio", "aiohttp", "numpy", "protobuf", "orjson")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return [
        f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, {versions}",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}",
    ]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # the page itself is rewritten by each run and says nothing about the code
        changed = git("status", "--porcelain", "--", ".", ":!bench/results.md")
        return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def page(results: Iterable[tuple[Scenario, Sequence[Subject]]], settings: Sequence[str]) -> str:
    """The results page."""
    parts = ["# Load bench", "\n".join(f"- {line}" for line in (*machine(), *settings)), LEGEND]
    for scenario, subjects in results:
        parts += [f"## {scenario.name}", scenario.title, markdown(columns(scenario), rows(scenario, subjects))]
    return "\n\n".join(parts) + "\n"
