"""Measures what each setting of a grpc.aio server gains, against the same server without it.

From the repository's root: `python -m bench.aio_tuning --help`. Bare servers, one process per setting, are loaded
in turn, round by round. They are restarted several times, because with large messages two equal servers differ
from start to start.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import uvloop

from bench import report, rounds, servers
from bench.measure import Subject, call_once, load
from bench.payloads import grpc_exchange, tensor
from bench.rounds import Measured, Plan
from bench.scenarios import KEEP_MEMORY, MIB, Scenario
from bench.tally import BenchError

MODEL = "bare"
LOADS = (
    Scenario("1x16-c1", 16, 1, grpc_exchange),
    Scenario("1x16-c64", 16, 64, grpc_exchange),
    Scenario("1MiB-c8", MIB, 8, grpc_exchange),
    Scenario("16MiB-c1", 16 * MIB, 1, grpc_exchange),
)
COLUMNS = (
    "setting",
    "calls/s",
    "x {first}",
    "(min-max)",
    "p50 ms",
    "p99 ms",
    "CPU µs/call",
    "x {first}",
    "client busy",
)
LEGEND = """\
Medians over rounds; the settings are loaded in turn, one at a time, round by round. "x" is the median of the
rounds' own ratios to the first line (and, in brackets, their range): 1.00 gives nothing. "the same again" has no
setting of its own: its ratio is this machine's noise. CPU is user and kernel time of the server for one call."""
FRAME, READ, THROUGHPUT = (
    "grpc.http2.max_frame_size",
    "grpc.experimental.tcp",
    "grpc.optimization_target=throughput",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a bare server. `environment`: additional environment variables."""

    name: str
    channel: Sequence[str] = ()
    """Channel arguments of grpc's server, NAME=VALUE."""
    uvloop: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def flags(self) -> tuple[str, ...]:
        """Return the command-line flags for `bench.bare`."""
        words = [word for argument in self.channel for word in ("--channel", argument)]
        return (*words, "--loop", "uvloop" if self.uvloop else "asyncio")


def _chunks(size: int) -> tuple[str, ...]:
    return f"{READ}_min_read_chunk_size={size}", f"{READ}_max_read_chunk_size={size}"


def _with(base: Setting, name: str, channel: Sequence[str]) -> Setting:
    return Setting(name, (*base.channel, *channel), base.uvloop, base.environment)


def settings(base: Setting) -> list[Setting]:
    """Return the base, the same again, the base with one change each, and last with all compatible changes."""
    small, large = 2**20, 2**22
    both = [
        _with(base, "max_frame_size 1 MiB", [f"{FRAME}={small}"]),
        _with(base, "max_frame_size 4 MiB", [f"{FRAME}={large}"]),
        _with(base, "max_frame_size 16 MiB", [f"{FRAME}={2**24 - 1}"]),
        _with(base, "read chunks of 1 MiB", _chunks(small)),
        _with(base, "read chunks of 4 MiB", _chunks(large)),
        _with(base, "optimised for throughput", [THROUGHPUT]),
        _with(base, "lookahead 16 MiB", [f"grpc.http2.lookahead_bytes={2**24}"]),
        _with(base, "no window probes", ["grpc.http2.bdp_probe=0"]),
        _with(base, "write buffer of 1 MiB", [f"grpc.http2.write_buffer_size={small}"]),
        _with(base, "frames, chunks, throughput", [f"{FRAME}={large}", *_chunks(large), THROUGHPUT]),
    ]
    single_options = []
    if not base.uvloop:
        single_options.append(Setting("uvloop", base.channel, True, base.environment))
    if not base.environment:
        single_options.append(Setting("memory kept", base.channel, base.uvloop, KEEP_MEMORY))
    older = {**base.environment, "GRPC_EXPERIMENTS": "-event_engine_listener"}
    single_options.append(Setting("listener of old", base.channel, base.uvloop, older))
    return [base, Setting("the same again", base.channel, base.uvloop, base.environment), *single_options, *both]


STOCK = Setting("stock")
KEPT = Setting("uvloop and memory kept", uvloop=True, environment=KEEP_MEMORY)
BASES = {"stock": STOCK, "tuned": KEPT}


def measure(
    scenario: Scenario, compared: Sequence[Setting], plan: Plan, core: int | None, starts: int = 1
) -> list[Measured[str]]:
    """Measure the settings under one load, with the servers started `starts` times."""
    totals: list[Measured[str]] = [Measured(setting.name) for setting in compared]
    for _ in range(starts):
        with ExitStack() as stack:
            subjects = list(_start(stack, scenario, compared, core))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                taken = runner.run(
                    rounds.interleaved(subjects, plan, lambda subject, *times: load(scenario, subject, *times))
                )
        for earlier, more in zip(totals, taken, strict=True):
            earlier.rounds += more.rounds
    return totals


def _start(
    stack: ExitStack, scenario: Scenario, compared: Sequence[Setting], core: int | None
) -> Iterator[Subject]:
    exchange = grpc_exchange(MODEL, tensor(scenario.rows, scenario.elements))
    for setting in compared:
        server, port, _ = stack.enter_context(
            servers.bare("grpc", exchange, core, setting.flags(), setting.environment)
        )
        subject = Subject(setting.name, server, port, exchange)
        subject.expected = call_once(subject)
        yield subject


def lines(measured: Sequence[Measured[str]]) -> str:
    """Return the table of one load."""
    header = [column.format(first=measured[0].setting) for column in COLUMNS]
    return report.plain(header, [rounds.row(measurement, measured[0]) for measurement in measured])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.aio_tuning", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 2, seconds=0.7)
    parser.add_argument(
        "--starts", type=int, default=3, help="how often servers are started (default: %(default)s)"
    )
    parser.add_argument(
        "--base", choices=BASES, default="stock", help="what every setting is added to (default: %(default)s)"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="settings whose name holds NAME")
    parser.add_argument(
        "--load",
        action="append",
        choices=[transport_load.name for transport_load in LOADS],
        help="one of the loads; may be repeated",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    arguments = parse(words)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    base, *others = settings(BASES[arguments.base])
    chosen = [
        other for other in others if not arguments.only or any(name in other.name for name in arguments.only)
    ]
    plan = Plan(arguments.rounds, arguments.seconds)
    described = f"{arguments.starts} starts with {plan.rounds} rounds of {plan.seconds:g} s; {cores.note}"
    print(*report.machine(), described, sep="\n", flush=True)
    try:
        for scenario in LOADS:
            if not arguments.load or scenario.name in arguments.load:
                measured = measure(scenario, [base, *chosen], plan, cores.server, arguments.starts)
                print(f"\n{scenario.title}", lines(measured), sep="\n", flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{LEGEND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
