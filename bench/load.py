"""The load bench: bare servers against ours, over loopback.

From the repository's root: `python -m bench.load --help`.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench import report, servers
from bench.measure import Settings, Subject, measure
from bench.scenarios import SCENARIOS, Scenario
from bench.tally import BenchError

RESULTS = Path(__file__).with_name("results.md")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load", description="bare servers against ours, over loopback"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="scenarios whose name holds NAME; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per scenario (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"results page (default: {RESULTS.name}, for whole runs only)")
    parser.add_argument(
        "--aa",
        action="store_true",
        help="load a second bare server in place of ours: ratios other than 1.00 are this machine's noise",
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


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write the page."""
    scenarios = choose(arguments.only)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    settings = Settings(arguments.rounds, arguments.seconds, cores.server, arguments.aa)
    described = [f"{settings.rounds} rounds of {settings.seconds:g} s; {cores.note}"]
    print(*report.machine(), *described, sep="\n", flush=True)
    results: list[tuple[Scenario, list[Subject]]] = []
    for scenario in scenarios:
        subjects = measure(scenario, settings)
        results.append((scenario, subjects))
        table = report.plain(report.columns(scenario), report.rows(scenario, subjects))
        print(f"\n{scenario.name}: {scenario.title}\n{table}", flush=True)
    print(f"\n{report.LEGEND}")
    whole = not arguments.only and not arguments.aa
    output = arguments.output or (RESULTS if whole else None)
    if output is not None:
        output.write_text(report.page(results, described), encoding="utf-8")
        print(f"\nwritten: {output}")


def main() -> int:
    arguments = parse()
    if arguments.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:26}{scenario.title}")
        return 0

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # through the `with` blocks that end the servers

    signal.signal(signal.SIGTERM, stop)
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
