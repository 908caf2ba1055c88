"""Measures what batching gains for a model whose batches of n rows take a + b·n.

From the repository's root: `python -m bench.batching --help`. Each setting is a model of its own, and all of them
are loaded in turn, round by round: first over gRPC, where the server's front end is part of the measurement and
may be the limit, then in this process directly on the engine, without any protocol.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import affine, engine, report, rounds, servers
from bench.affine import Batching
from bench.measure import Subject, call_once, load
from bench.payloads import grpc_exchange, tensor
from bench.rounds import Measured
from bench.scenarios import Scenario
from bench.tally import BenchError
from triglot.scheduling.servable import Servable

ELEMENTS = 16
DELAYS = (0.001, 0.002, 0.005)
UNBATCHED = Batching("unbatched", on=False)
AT_ONCE = Batching("delay 0")
COLUMNS = (
    "setting",
    "calls/s",
    "x unbatched",
    "(min-max)",
    "p50 ms",
    "p99 ms",
    "CPU µs/call",
    "x unbatched",
    "client busy",
)
LEGEND = """\
Medians over rounds; the settings are loaded in turn, one at a time, round by round. "x unbatched" is the median of
the rounds' own ratios to the first line (and, in brackets, their range). CPU covers user and kernel time: of the
server over gRPC, of the whole process on the engine. "client busy" is the share of one core that the load client
used. "delay d, size n": an idle instance waits for d, or until there are n rows."""


def settings(in_flight: int) -> list[Batching]:
    """Return the settings to compare with this number of calls in flight; with one, there is nothing to batch."""
    if in_flight == 1:
        return [UNBATCHED, AT_ONCE, Batching("delay 5 ms", delay=0.005)]
    sizes = (in_flight // 2, in_flight)
    by_hand = [
        Batching(f"delay {delay * 1e3:g} ms, size {size}", delay=delay, sizes=(size,))
        for delay in DELAYS
        for size in sizes
    ]
    return [UNBATCHED, AT_ONCE, *by_hand]


# --- over gRPC ---


@contextmanager
def _serving(batchings: Sequence[Batching], core: int | None) -> Iterator[list[Subject]]:
    """Run a server with one model per setting."""
    values = tensor(1, ELEMENTS)
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        folder = Path(name)
        for number, batching in enumerate(batchings):
            affine.write(folder / "models" / f"model_{number}", batching)
        with servers.serving(folder / "models", core) as (server, grpc_port, _):
            yield [
                Subject(batching.name, server, grpc_port, grpc_exchange(f"model_{number}", values))
                for number, batching in enumerate(batchings)
            ]


def over_grpc(in_flight: int, plan: rounds.Plan, core: int | None) -> list[Measured[Batching]]:
    """Measure all settings on one server, with calls one after the other on each of `in_flight` streams."""
    measured = [Measured(batching) for batching in settings(in_flight)]
    scenario = Scenario("batching", ELEMENTS, in_flight, grpc_exchange)
    with _serving([measurement.setting for measurement in measured], core) as subjects:
        for subject in subjects:
            subject.expected = call_once(subject)

        async def run() -> None:
            for subject in subjects:
                await load(scenario, subject, min(0.5, plan.seconds), 0.1)
            for _ in range(plan.rounds):
                for measurement, subject in zip(measured, subjects, strict=True):
                    measurement.rounds.append(await load(scenario, subject, min(0.5, plan.seconds), plan.seconds))

        asyncio.run(run())
    return measured


# --- on the engine ---


async def _on_engine(measured: Sequence[Measured[Batching]], in_flight: int, plan: rounds.Plan) -> None:
    servables = [
        Servable(measurement.setting.name, 1, affine.model(measurement.setting), max_queue_size=2 * in_flight)
        for measurement in measured
    ]
    try:
        for servable in servables:
            await engine.load(servable, ELEMENTS, in_flight, min(0.5, plan.seconds))
        for _ in range(plan.rounds):
            for measurement, servable in zip(measured, servables, strict=True):
                await engine.load(servable, ELEMENTS, in_flight, min(0.2, plan.seconds))
                measurement.rounds.append(await engine.load(servable, ELEMENTS, in_flight, plan.seconds))
    finally:
        for servable in servables:
            await servable.close()


def on_engine(in_flight: int, plan: rounds.Plan) -> list[Measured[Batching]]:
    """Measure the same settings without a server: the gain of batching itself."""
    measured = [Measured(batching) for batching in settings(in_flight)]
    asyncio.run(_on_engine(measured, in_flight, plan))
    return measured


# --- output ---


def ratio(mine: Measured[Batching], other: Measured[Batching]) -> float:
    """Return the ratio of throughputs: the median of the rounds' own ratios."""
    return statistics.median(rounds.ratios(mine, other))


def _row(measurement: Measured[Batching], first: Measured[Batching]) -> list[str]:
    rates = rounds.ratios(measurement, first)
    cpu = [mine.cpu for mine in measurement.rounds if mine.cpu is not None]
    busy = measurement.median(lambda mine: mine.client_busy)
    return [
        measurement.setting.name,
        f"{measurement.median(lambda mine: mine.rate):,.0f}",
        rounds.middle(rates),
        rounds.span(rates),
        f"{measurement.median(lambda mine: mine.p50) * 1e3:.3g}",
        f"{measurement.median(lambda mine: mine.p99) * 1e3:.3g}",
        f"{statistics.median(cpu) * 1e6:,.0f}" if cpu else "n/a",
        rounds.middle(rounds.costs(measurement, first)),
        f"{busy:.0%}{' !' if busy > report.CLIENT_BOUND else ''}" if busy else "n/a",
    ]


def lines(measured: Sequence[Measured[Batching]]) -> Iterator[str]:
    """Yield the table of one load, and its conclusion."""
    first = measured[0]
    yield report.plain(COLUMNS, [_row(measurement, first) for measurement in measured])
    if len(measured) > len(settings(1)):
        best = max(measured[1:], key=lambda measurement: measurement.median(lambda mine: mine.rate))
        yield f"batched / unbatched: {ratio(best, first):.1f} with {best.setting.name}, goal 8"
    else:
        p50s = zip(measured[1].rounds, first.rounds, strict=True)
        more = statistics.median(mine.p50 - its.p50 for mine, its in p50s)
        yield f"alone, {measured[1].setting.name}: p50 {more * 1e6:+,.0f} µs against unbatched, goal: no delay"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.batching", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 3)
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[1, 64, 256], help="calls in flight (default: 1 64 256)"
    )
    parser.add_argument("--only", choices=["grpc", "engine"], help="one of the two")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    arguments = parse(words)
    plan = rounds.Plan(arguments.rounds, arguments.seconds)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    what = f"a model that sleeps {affine.A * 1e3:g} ms + {affine.B * 1e3:g} ms·n for n rows of {ELEMENTS} FP32, "
    what += f"1 instance, max_batch_size {affine.MAX_BATCH_SIZE}"
    described = f"{plan.rounds} rounds of {plan.seconds:g} s"
    print(*report.machine(), what, described, sep="\n", flush=True)
    try:
        for in_flight in arguments.in_flight:
            if arguments.only != "engine":
                print(f"\nover gRPC, {in_flight} in flight; {cores.note}")
                print(*lines(over_grpc(in_flight, plan, cores.server)), sep="\n", flush=True)
            if arguments.only != "grpc":
                print(f"\non the engine, {in_flight} in flight; everything on one core")
                print(*lines(on_engine(in_flight, plan)), sep="\n", flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{LEGEND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
