"""The load bench: bare servers against ours, over loopback.

From the repository's root: `python -m bench.load --help`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench import aims, native, page, report, servers
from bench.comparing import Settings, compare
from bench.rounds import Measured
from bench.scenarios import SCENARIOS, Scenario
from bench.tally import BenchError
from triglot.config import Config

RESULTS = Path(__file__).with_name("results.md")
CORES_TO_SHARE = 2


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
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
    arguments = parser.parse_args(words)
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    return arguments


def choose(names: Sequence[str] | None) -> list[Scenario]:
    """The scenarios that `--only` asks for."""
    for name in names or ():
        if not any(name in scenario.name for scenario in SCENARIOS):
            raise BenchError(f"no scenario's name holds {name!r}; see --list")
    return [one for one in SCENARIOS if not names or any(name in one.name for name in names)]


def left_out(scenario: Scenario) -> str:
    """Why it cannot be measured here; "" when it can."""
    if scenario.needs and scenario.needs not in {option.name for option in fields(Config)}:
        return f"this server has no option {scenario.needs}"
    if scenario.shared_cores and (os.cpu_count() or 1) < CORES_TO_SHARE:
        return f"it takes {CORES_TO_SHARE} cores"
    return ""


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write the page."""
    scenarios = choose(arguments.only)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    settings = Settings(arguments.rounds, arguments.seconds, cores.server, cores.usable, arguments.aa)
    described = [f"{settings.rounds} rounds of {settings.seconds:g} s; {cores.note}", _clients()]
    print(*report.machine(), *described, sep="\n", flush=True)
    results: list[tuple[Scenario, list[Measured[str]]]] = []
    for number, scenario in enumerate(scenarios, 1):
        print(f"\n{number} of {len(scenarios)}, {scenario.name}: {scenario.title}", flush=True)
        if why := left_out(scenario):
            print(f"left out: {why}", flush=True)
            continue
        measured = compare(scenario, settings)
        results.append((scenario, measured))
        print(report.plain(page.columns(scenario), page.rows(scenario, measured)), flush=True)
    whole = not arguments.only and not arguments.aa
    if whole:
        goals = aims.rows({scenario.name: measured for scenario, measured in results})
        print("", report.plain(page.GOAL_COLUMNS, goals), sep="\n")
    print(f"\n{page.LEGEND}")
    output = arguments.output or (RESULTS if whole else None)
    if output is not None:
        picture = output.with_suffix(".svg")
        picture.write_text(page.drawn(results), encoding="utf-8")
        output.write_text(page.page(results, described, picture.name), encoding="utf-8")
        print(f"\nwritten: {output}, {picture}")


def _clients() -> str:
    if native.found():
        return f"small calls are loaded by {native.version()}, all others by our own client"
    return "all calls are loaded by our own client; with nghttp2-client installed, h2load loads small ones"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when something went wrong."""
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
