"""The load bench: compares triglot with bare servers, over loopback.

From the repository's root: `python -m bench.load --help`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import aims, native, page, report, servers, triton
from bench.comparing import Settings, compare, lines_of
from bench.rounds import Measured
from bench.scenarios import SCENARIOS, Scenario
from bench.servers import Checkout
from bench.tally import BenchError

RESULTS = Path(__file__).with_name("results.md")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.load", description="bare servers against ours, over loopback"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="scenarios whose name holds NAME; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per scenario (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"results page (default: {RESULTS.name}, for whole runs only)")
    parser.add_argument(
        "--aa",
        action="store_true",
        help="load a second server like the first one: ratios other than 1.00 are this machine's noise",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="another checkout of the project: load its server, too, in turn with this one's, and no others",
    )
    arguments = parser.parse_args(words)
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    return arguments


def choose(names: Sequence[str] | None) -> list[Scenario]:
    """Return the scenarios that `--only` names, or all."""
    for name in names or ():
        if not any(name in scenario.name for scenario in SCENARIOS):
            raise BenchError(f"no scenario's name holds {name!r}; see --list")
    return [scenario for scenario in SCENARIOS if not names or any(name in scenario.name for name in names)]


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the results page."""
    scenarios = choose(arguments.only)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    against = Checkout(arguments.against.resolve()) if arguments.against else None
    settings = Settings(arguments.rounds, arguments.seconds, cores.server, cores.usable, arguments.aa, against)
    described = [f"{settings.rounds} rounds of {settings.seconds:g} s; {cores.note}"]
    if against is None:
        described += list(filter(None, (triton.left_out(), native.left_out())))
    print(*report.machine(), *described, sep="\n", flush=True)
    results: list[tuple[Scenario, list[Measured[str]]]] = []
    for number, scenario in enumerate(scenarios, 1):
        print(f"\n{number} of {len(scenarios)}, {scenario.name}: {scenario.title}", flush=True)
        lines, reasons = lines_of(scenario, against)
        if not lines:
            print(f"left out: {'; '.join(reasons)}", flush=True)
            continue
        measured = compare(scenario, settings)
        results.append((scenario, measured))
        if against is not None:
            print(report.plain(page.PAIR_COLUMNS, page.pair_rows(measured)), flush=True)
        else:
            print(report.plain(page.columns(scenario), page.rows(scenario, measured)), flush=True)
    complete = not arguments.only and not arguments.aa and against is None
    if complete:
        goals = aims.rows({scenario.name: measured for scenario, measured in results})
        print("", report.plain(page.GOAL_COLUMNS, goals), sep="\n")
    print(f"\n{page.LEGEND}")
    output = arguments.output or (RESULTS if complete else None)
    if output is not None:
        picture = output.with_suffix(".svg")
        picture.write_text(page.drawn(results), encoding="utf-8")
        output.write_text(page.page(results, described, picture.name), encoding="utf-8")
        print(f"\nwritten: {output}, {picture}")


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    arguments = parse(words)
    if arguments.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:26}{scenario.title}")
        return 0
    try:
        run(arguments)
    except BenchError as error:
        print(f"\nthe bench failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
