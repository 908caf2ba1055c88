"""Formats the measurements as tables for a terminal, and as the results page."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import aims, chart, other_results, report
from bench.aims import Results
from bench.measure import Round
from bench.report import CLIENT_BOUND
from bench.rounds import BUSY, Measured, client_bound, costs, middle, ratios, span
from bench.scenarios import Scenario
from bench.traffic import COUNT, TIMEOUT

HERE = Path(__file__).parent
COLUMNS = ("line", "{what}s/s", "x first", "(min-max)", "p50 ms", "p99 ms", "CPU µs/{what}", "x first")
GOAL_COLUMNS = ("work", "aim", "measured", "met")
LAST_COLUMNS = ("peak MiB", "client busy")
PAIR_COLUMNS = (
    "line",
    "calls/s",
    "there",
    "here / there",
    "(min-max)",
    "CPU µs/call",
    "there",
    "here / there",
    "(min-max)",
    "client busy",
)
LEGEND = f"""\
No small call is like another one, unless the line says "identical calls": each has other values, 1 to 8 rows,
an id (a UUID), a deadline of {TIMEOUT[0]} to {TIMEOUT[1]} ms and a W3C traceparent of its own;
{COUNT:,} of them are made beforehand and sent in turn. REST has no deadline here, and the traceparent is a
header; where messages have no id, it is in x-request-id. Header blocks are, byte by byte, what C-core writes. Each
reply must hold its own request's values and id. "Identical calls" are one row without any of that, again and
again: what a cache of whole requests makes of a bench, and of no user's calls. Large messages (1×150,528, 1000×16,
1 MiB and more) are the same each time.

Medians over rounds; the lines of a scenario are loaded in turn, one at a time, round by round. "x first" is the
median of the rounds' own ratios to the first line (and, in brackets, their range), so a machine that speeds up or
slows down between rounds does not enter. Calls/s: more is better; CPU per call: less is better. "First ms" is the
median time to the first bytes of a stream, p50 and p99 are of whole streams. CPU covers user and kernel time of
the server's threads and child processes. Peak memory is the server's since its start, all lines that share the
server together. "Client busy" is the share of one core that the load client used; above {CLIENT_BOUND:.0%},
or above {BUSY:.0%} and what the server used, it is marked with !: the client was the limit, calls/s and
latency are the client's, and CPU per call is what to compare.

"h2" and "aio" are ours, over HTTP/2 of our own and over grpc.aio; "thread" and "async" say how the model runs: on
an instance's thread, or as a coroutine. "Bare" servers do nothing
but receive a request and send ready-made bytes; "+ json" reads and writes them with json and numpy. They are
stock; "tuned" ones run on uvloop and keep freed memory, as ours do. A stock one with large messages may differ by
a factor of two from start to start, as glibc's malloc happens to give memory back to the kernel or not: there, the
servers are started several times, as the title says. "tritonserver" is Triton's, with models of a backend in C++
that gives back its inputs, on the same one core."""


def columns(scenario: Scenario) -> list[str]:
    """Return the table's header, for calls or for a stream's messages."""
    what = "message" if scenario.messages > 1 else "call"
    first = ("first ms",) if scenario.messages > 1 else ()
    return [column.format(what=what) for column in (*COLUMNS, *first, *LAST_COLUMNS)]


def rows(scenario: Scenario, measured: Sequence[Measured[str]]) -> list[list[str]]:
    """Return one table row for each line; the first is the baseline."""
    return [_row(measurement, measured[0], scenario.messages) for measurement in measured]


def _row(measurement: Measured[str], first: Measured[str], messages: int) -> list[str]:
    rates, busy = ratios(measurement, first), measurement.median(lambda mine: mine.client_busy)
    cpu = [mine.cpu for mine in measurement.rounds if mine.cpu is not None]
    rate = measurement.median(lambda mine: mine.rate) * messages
    return [
        measurement.setting,
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}",
        middle(rates),
        span(rates),
        f"{measurement.median(lambda mine: mine.p50) * 1e3:.3g}",
        f"{measurement.median(lambda mine: mine.p99) * 1e3:.3g}",
        f"{statistics.median(cpu) / messages * 1e6:,.0f}" if cpu else "n/a",
        middle(costs(measurement, first)),
        *([f"{measurement.median(_first) * 1e3:.3g}"] if messages > 1 else []),
        f"{measurement.peak / 2**20:,.0f}" if measurement.peak is not None else "n/a",
        f"{busy:.0%}{' !' if client_bound(measurement) else ''}",
    ]


def pair_rows(measured: Sequence[Measured[str]]) -> list[list[str]]:
    """Return one table row for each pair of lines of two checkouts, which alternate in `measured`."""
    return [_pair(first, second) for first, second in zip(measured[::2], measured[1::2], strict=True)]


def _pair(first: Measured[str], second: Measured[str]) -> list[str]:
    """Return a row with the ratios of the first to the second."""
    rates, cpus = ratios(first, second), costs(first, second)
    busy = max(measurement.median(lambda mine: mine.client_busy) for measurement in (first, second))
    return [
        first.setting,
        *(f"{measurement.median(lambda mine: mine.rate):,.0f}" for measurement in (first, second)),
        middle(rates),
        span(rates),
        *(f"{measurement.median(lambda mine: mine.cpu or 0.0) * 1e6:,.1f}" for measurement in (first, second)),
        middle(cpus),
        span(cpus),
        f"{busy:.0%}{' !' if client_bound(first) or client_bound(second) else ''}",
    ]


def _first(run: Round) -> float:
    return run.first or 0.0


def drawn(measured: Sequence[tuple[Scenario, Sequence[Measured[str]]]]) -> str:
    """Return a chart of the ratios to the first lines, for the scenarios that have a goal."""
    aimed = {aim.scenario for aim in aims.AIMS}
    groups = [
        chart.Group(
            f"{scenario.name}: calls/s, times {lines[0].setting}",
            [(line.setting, statistics.median(ratios(line, lines[0]))) for line in lines],
        )
        for scenario, lines in measured
        if scenario.name in aimed
    ]
    return chart.svg("Calls a second, as a multiple of the first line's", groups, "×")


def page(
    results: Sequence[tuple[Scenario, Sequence[Measured[str]]]],
    settings: Sequence[str],
    picture: str,
    folder: Path = HERE,
) -> str:
    """Return the results page; `picture` is the chart's file, `folder` has the other benches' texts."""
    by_name: Results = {scenario.name: measured for scenario, measured in results}
    goals = [*aims.rows(by_name), *other_results.rows(folder)]
    parts = [
        "# Speed",
        "\n".join(f"- {line}" for line in (*report.machine(), *settings)),
        "## What we aim at",
        report.markdown(GOAL_COLUMNS, goals),
        f"![each line's calls a second, as a multiple of the first line's]({picture})",
        "## How it is measured",
        LEGEND,
    ]
    for scenario, measured in results:
        parts += [
            f"## {scenario.name}",
            scenario.title,
            report.markdown(columns(scenario), rows(scenario, measured)),
        ]
    other_lines = [f"- [{name}]({name}): {line}" for name, line in other_results.quoted_lines(folder)]
    if other_lines:
        parts += ["## Other benches", "\n".join(other_lines)]
    return "\n\n".join(parts) + "\n"
