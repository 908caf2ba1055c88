"""Measures what process instances gain for code that holds the GIL, and what they cost.

From the repository's root: `python -m bench.process --help`. Directly on the engine, without any protocol: the
same model with thread and with process instances, in turn, round by round.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import engine, holding, losing, report, rounds
from bench.holding import COMPUTES, GIVES_BACK, STEPS
from bench.rounds import Measured, Plan, ratios
from triglot import backends
from triglot.executors.loading import Loading
from triglot.executors.remote.remote_model import RemoteModel
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.scheduling.servable import Servable

BUSY_ELEMENTS = 16
SIZES = (64, 64 * 1024, 2**20)
"""Bytes of the input tensor, and of the output tensor."""
LOSSES = 5
COLUMNS = ("instances", "calls/s", "x 1 process", "(min-max)", "p50 ms", "p99 ms")
HAND_OVER_COLUMNS = ("tensor", "thread p50 µs", "process p50 µs", "more µs", "(min-max)")
LEGEND = """\
Medians over rounds; what is compared is loaded in turn, one at a time, round by round. "x 1 process" is the median
of the rounds' own ratios to the line of one process, "more" that of the rounds' own differences to the thread."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind and number of a model's instances, and the expression for its output."""

    execution: str
    instances: int
    gives: str = GIVES_BACK

    def __str__(self) -> str:
        what = "process" if self.execution == "process" else "thread"
        return f"1 {what}" if self.instances == 1 else f"{self.instances} {what.replace('ss', 'sse')}s"


ONE_PROCESS = Kind("process", 1)
KINDS = (ONE_PROCESS, Kind("process", 2), Kind("thread", 1), Kind("thread", 2))


@asynccontextmanager
async def _serving(folder: Path, kind: Kind, steps: int) -> AsyncIterator[Servable]:
    name = f"{kind.execution}_{kind.instances}_{steps}"
    file = holding.write(folder / name, kind.instances, steps, gives=kind.gives)

    def load() -> Model:
        if kind.execution == "thread":
            return backends.load("python", file)
        model: RemoteModel = Loading(backends.load)(str(kind), "python", file, ModelConfig())
        model.start()
        return model

    servable = Servable(str(kind), 1, await asyncio.to_thread(load), max_queue_size=1000)
    try:
        yield servable
    finally:
        await servable.close()


async def _compare(
    kinds: Sequence[Kind], steps: int, elements: int, in_flight: int, plan: Plan
) -> list[Measured[Kind]]:
    measured = [Measured(kind) for kind in kinds]
    settle = min(0.3, plan.seconds)
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        for _ in range(plan.rounds):
            for measurement in measured:
                # Each alone: even idle processes use some CPU time.
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    async with _serving(Path(folder), measurement.setting, steps) as servable:
                        await engine.load(servable, elements, in_flight, settle)
                        measurement.rounds.append(await engine.load(servable, elements, in_flight, plan.seconds))
    return measured


def busy(plan: Plan, in_flight: int = 4, steps: int = STEPS) -> list[Measured[Kind]]:
    """Measure a model that holds the GIL all the time."""
    return asyncio.run(_compare(KINDS, steps, BUSY_ELEMENTS, in_flight, plan))


def hand_over(plan: Plan, size: int, gives: str = GIVES_BACK) -> list[Measured[Kind]]:
    """Measure sequential calls of a model that does no work, with a thread and with a process instance."""
    kinds = (Kind("thread", 1, gives), Kind("process", 1, gives))
    return asyncio.run(_compare(kinds, 0, size // 4, 1, plan))


# --- output ---


def more(process: Measured[Kind], thread: Measured[Kind]) -> list[float]:
    """Return the differences of p50 in seconds, round by round."""
    return [mine.p50 - its.p50 for mine, its in zip(process.rounds, thread.rounds, strict=True)]


def busy_lines(measured: Sequence[Measured[Kind]]) -> Iterator[str]:
    """Yield the table, and its conclusion."""
    first = next(measurement for measurement in measured if measurement.setting == ONE_PROCESS)
    rows = []
    for measurement in measured:
        times = ratios(measurement, first)
        rows.append(
            (
                str(measurement.setting),
                f"{measurement.median(lambda mine: mine.rate):,.0f}",
                rounds.middle(times),
                rounds.span(times),
                f"{measurement.median(lambda mine: mine.p50) * 1e3:.3g}",
                f"{measurement.median(lambda mine: mine.p99) * 1e3:.3g}",
            )
        )
    yield report.plain(COLUMNS, rows)
    two = next(measurement for measurement in measured if measurement.setting == Kind("process", 2))
    yield f"2 processes / 1 process: {statistics.median(ratios(two, first)):.2f}, goal 1.7"


def hand_over_lines(by_size: Sequence[tuple[int, Sequence[Measured[Kind]]]]) -> Iterator[str]:
    """Yield the table of all sizes, and its conclusion."""
    rows = []
    for size, (thread, process) in by_size:
        differences = [seconds * 1e6 for seconds in more(process, thread)]
        rows.append(
            (
                f"{size:,} bytes{', computed' if process.setting.gives == COMPUTES else ''}",
                f"{thread.median(lambda run: run.p50) * 1e6:,.0f}",
                f"{process.median(lambda run: run.p50) * 1e6:,.0f}",
                f"{statistics.median(differences):,.0f}",
                f"({min(differences):,.0f}-{max(differences):,.0f})",
            )
        )
    yield report.plain(HAND_OVER_COLUMNS, rows)
    size, (thread, process) = by_size[-1]
    cost = statistics.median(more(process, thread)) * 1e6
    yield f"{size:,} bytes in and out: {cost:,.0f} µs more than a thread, goal 300"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.process", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 5)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = parse(words)
    plan = Plan(arguments.rounds, arguments.seconds)
    print(*report.machine(), f"{plan.rounds} rounds of {plan.seconds:g} s", sep="\n", flush=True)
    print(f"\na model in pure Python, {STEPS:,} steps, 4 in flight; the processes on all cores")
    print(*busy_lines(busy(plan)), sep="\n", flush=True)
    print("\na model that gives back its input, or computes as many bytes, 1 in flight")
    computed = (SIZES[-1], hand_over(plan, SIZES[-1], COMPUTES))
    print(*hand_over_lines([computed, *((size, hand_over(plan, size)) for size in SIZES)]), sep="\n", flush=True)
    print(f"\na process that is lost while it runs a call, {LOSSES} times")
    lost = {name: asyncio.run(losing.lose(way, LOSSES)) for name, way in losing.WAYS.items()}
    print(*losing.lines(lost), sep="\n", flush=True)
    print(f"\n{LEGEND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
