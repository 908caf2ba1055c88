"""Compares the builds: pure and compiled, under one interpreter or two, beside Triton's server.

From the repository's root: `python -m bench.builds [--server-python PATH]`; TRITON names tritonserver's binary.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import page, report, servers, triton
from bench.comparing import Settings, measure
from bench.rounds import add_arguments
from bench.scenarios import ASYNC, BY_NAME, H2, REST, Line, Scenario
from bench.servers import ROOT, Checkout
from bench.tally import BenchError
from bench.traffic import IDENTICAL, ONE_ROW

NAMES = (
    "infer-c64",
    "infer-c8",
    "kinds-c64",
    "stream-c64",
    "rest-json-c64",
    "rest-json-c8",
    "rest-predict-c8",
    "infer-1MiB-c8",
    "infer-16MiB-c4",
)


@dataclass(frozen=True, slots=True)
class Build:
    """A build of this project's server, and the interpreter that runs it."""

    name: str
    checkout: Checkout | None = None
    """Where the compiled modules are; None for the pure build."""
    python: str = sys.executable


def compiled() -> Checkout:
    """Compile this project, unless that was done, and return the copy. Raise `BenchError` if it fails."""
    command = [sys.executable, str(ROOT / "codegen" / "compiled.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise BenchError("the compiled build cannot be made")
    return Checkout(Path(done.stdout.strip()), source="")


def builds(other_python: Path | None) -> list[Build]:
    """Return the builds to measure. Raise `BenchError` for one that cannot be made."""
    compiled_modules = compiled()
    both = [Build("pure"), Build("compiled", compiled_modules)]
    if other_python is not None:
        python = servers.environment_of(other_python)
        both += [replace(build, name=f"{build.name}, other Python", python=python) for build in both]
    return both


def groups(scenario: Scenario, builds: Sequence[Build]) -> Iterator[tuple[str, list[Line]]]:
    """Yield what is compared: each line of our server, under every build, after the same line of Triton's.

    Lines with a coroutine for a model, over grpc.aio, or of identical calls are skipped.
    """
    for line in scenario.lines:
        if line.launch not in (H2, REST) or line.model == ASYNC or line.traffic in (IDENTICAL, ONE_ROW):
            continue
        same = [
            replace(other, name=other.launch.name)
            for other in scenario.lines
            if other.launch.triton
            and not triton.left_out()
            and replace(other, name=line.name, launch=line.launch) == line
        ]
        yield (
            line.name,
            same
            + [
                replace(
                    line,
                    name=build.name,
                    launch=replace(line.launch, name=build.name, checkout=build.checkout, python=build.python),
                )
                for build in builds
            ],
        )


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    cores = servers.choose_cores()
    servers.pin(cores.client)
    settings = Settings(arguments.rounds, arguments.seconds, cores.server, cores.usable)
    measured_builds = builds(arguments.server_python)
    print(*report.machine(), f"{settings.rounds} rounds of {settings.seconds:g} s; {cores.note}", sep="\n")
    if arguments.server_python is not None:
        print(f"other Python: {report.interpreter(measured_builds[-1].python)}")
    print(triton.left_out() or "Triton's server with a backend in C++ is the first line where it has the call")
    for name in NAMES:
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        scenario = BY_NAME[name]
        compared = list(groups(scenario, measured_builds))
        measured = measure(scenario, [line for _, lines in compared for line in lines], settings)
        for what, lines in compared:
            mine, measured = measured[: len(lines)], measured[len(lines) :]
            print(f"\n{name}, {what}: {scenario.title}")
            print(report.plain(page.columns(scenario), page.rows(scenario, mine)), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.builds", description="the builds, beside Triton's server"
    )
    add_arguments(parser, 5, 0.3)
    parser.add_argument("--only", action="append", metavar="NAME", help="scenarios whose name holds NAME")
    parser.add_argument(
        "--server-python", type=Path, metavar="PATH", help="another interpreter, to run both builds"
    )
    try:
        run(parser.parse_args(words))
    except BenchError as error:
        print(f"\nthe bench failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
