"""Measures instances on nodes of a Ray cluster: their throughput, the latency that they add, and lost nodes.

From the repository's root: `python -m bench.ray --help`. The nodes are real, a raylet each with processes of its
own, but all on this machine: there is no network, and there are no further cores. For comparison, the same number
of process instances of a server is loaded in turn.
"""

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench import h2client, measure, raychanges, report, rounds, servers
from bench.measure import Round, Subject
from bench.payloads import framed, grpc_exchange
from bench.raymodel import AT_ONCE, COMPUTES, ROWS, SLEEPS
from bench.raynodes import START_LIMIT, Nodes, cluster, on_ray, serving, values
from bench.rounds import Plan
from bench.servers import ROOT, Server
from bench.tally import BenchError, Request, close, drive

NODES = 3
SERVE = "Ray Serve"
ELEMENTS = 64
"""Elements of a row."""
IN_FLIGHT = 12
SIZES = (64, 2**20)
"""Bytes of the input tensor, and of the output tensor."""
KINDS = {
    SLEEPS: "sleeps 2 ms, as for a device: what the instances have to do is no matter of this machine's cores",
    COMPUTES: "uses 2 ms of CPU: all instances share this machine's cores with server and client",
}
RATE_COLUMNS = ("instances", "calls/s", "x process", "(min-max)")
COLUMNS = (*RATE_COLUMNS, "CPU µs: server", "instances", "Ray", "calls/CPU s", "x process", "(min-max)")
LEGEND = """\
Medians over rounds, in turn, one at a time; "x process" is the median of the rounds' own ratios to the line of
processes, "more" that of the rounds' own differences to the thread. CPU of a call: of the server's own process; of
the processes that run the model; of Ray's (driver, raylets, head). "calls/CPU s": for each second of the CPU that
these use, so throughput per core used."""


@dataclass(frozen=True, slots=True)
class Split(Round):
    """A round with the CPU seconds per call of the server, of the instances, and of Ray, which always runs."""

    server: float = 0.0
    instances: float = 0.0
    ray: float = 0.0

    def per_core(self, *, on_ray: bool) -> float:
        """Return the calls per CPU second; Ray's CPU time counts if the instances are `on_ray`."""
        return 1 / (self.server + self.instances + (self.ray if on_ray else 0.0))


@dataclass(slots=True)
class Line:
    """A subject of the comparison, and its rounds."""

    subject: Subject
    on_ray: bool = True
    rounds: list[Split] = field(default_factory=list)

    def per_core(self) -> list[float]:
        """Return the calls per CPU second of each round."""
        return [run.per_core(on_ray=self.on_ray) for run in self.rounds]


# --- throughput ---


async def _loaded(nodes: Nodes, subject: Subject, settle: float, seconds: float) -> Split:
    requests = [Request(subject.exchange.body)]
    connections = await h2client.connect(subject.port, subject.exchange.path, requests, IN_FLIGHT)
    try:
        await drive(connections, settle, subject.expected)
        before = _cpu(nodes, subject.server)
        outcome = await drive(connections, seconds, subject.expected)
        after = _cpu(nodes, subject.server)
    finally:
        await close(*connections)
    totals = measure.round_of(outcome, None, None, 0.0)
    used = {"server": 0.0, "instances": 0.0, "ray": 0.0}
    for pid, (whose, cpu) in after.items():
        used[whose] += (cpu - before.get(pid, ("", 0.0))[1]) / outcome.calls
    return Split(totals.rate, totals.p50, totals.p99, **used)


def _cpu(nodes: Nodes, server: Server) -> dict[int, tuple[str, float]]:
    """Return by process id: the part that the process belongs to, and its CPU seconds."""
    own, *children = servers.tree(server.process.pid)
    whose = {own: "server"}
    for pid in children:
        whose[pid] = "ray" if b"executors.ray.driver" in _command(pid) else "instances"
    for pid in nodes.processes():
        whose[pid] = "instances" if b"ray::Instance" in _command(pid) else "ray"
    return {pid: (whose[pid], cpu) for pid, cpu in servers.cpu_of(whose).items()}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # The process has ended.
        return b""


def throughput(nodes: Nodes, plan: Plan, kinds: Sequence[float] = tuple(KINDS)) -> dict[float, list[Line]]:
    """Measure process instances, and actors with one batch and, idempotent or not, with two batches each."""
    settle = min(0.3, plan.seconds)
    count = len(nodes.nodes)
    ways: dict[str, Mapping[str, object]] = {
        f"{count} processes, 1 machine": {"execution": "process"},
        f"{count} nodes, 1 batch each": on_ray(ray_max_inflight=1),
        f"{count} nodes, 2 batches each": on_ray(ray_max_inflight=2),
        f"{count} nodes, 2 batches each, idempotent": on_ray(ray_max_inflight=2, idempotent="true"),
    }
    measured: dict[float, list[Line]] = {}
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name, ExitStack() as stack:
        started = [
            stack.enter_context(serving(nodes, f"works_{number}", parameters, count, Path(name)))
            for number, parameters in enumerate(ways.values())
        ]
        for kind in kinds:
            lines = measured[kind] = []
            for number, (way, (server, port, _)) in enumerate(zip(ways, started, strict=True)):
                exchange = grpc_exchange(f"works_{number}", values(kind, ROWS, ELEMENTS))
                subject = Subject(way, server, port, exchange, framed([exchange.reply]))
                lines.append(Line(subject, ways[way]["execution"] == "ray"))
                measure.call_once(lines[-1].subject)
            for turn in range(plan.rounds + 1):
                for line in lines:
                    taken = asyncio.run(_loaded(nodes, line.subject, settle, plan.seconds if turn else settle))
                    if turn:  # The first round is a warm-up.
                        line.rounds.append(taken)
    return measured


def throughput_lines(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the table, and its conclusion."""
    first = lines[0]
    rows = []
    for line in lines:
        rates = [run.rate / other.rate for run, other in zip(line.rounds, first.rounds, strict=True)]
        per_core = [rate / other for rate, other in zip(line.per_core(), first.per_core(), strict=True)]
        split = [(run.server, run.instances, run.ray) for run in line.rounds]
        rows.append(
            (
                line.subject.name,
                f"{statistics.median(run.rate for run in line.rounds):,.0f}",
                rounds.middle(rates),
                rounds.span(rates),
                *(f"{statistics.median(part) * 1e6:,.0f}" for part in zip(*split, strict=True)),
                f"{statistics.median(line.per_core()):,.0f}",
                rounds.middle(per_core),
                rounds.span(per_core),
            )
        )
    yield report.plain(COLUMNS, rows)
    rest = statistics.median(run.ray * run.rate for run in first.rounds)
    yield f"Ray's own processes while none of its instances runs: {rest:.0%} of a core, not counted for processes"
    single, two = lines[1], lines[-1]
    overlap = [mine.rate / its.rate for mine, its in zip(two.rounds, single.rounds, strict=True)]
    # An idempotent model's instance does not wait for the server between two batches.
    yield f"a batch that travels while another one runs: {rounds.middle(overlap)} of the calls/s without"
    yield f"{two.subject.name}: {rows[-1][-2]} of the processes' throughput per core used, goal 0.8"


# --- latency of the hop to an instance ---


@contextmanager
def _serve(nodes: Nodes, folder: Path) -> Iterator[tuple[Server, int]]:
    """Run Ray Serve; yields its server and gRPC port.

    Its actors may outlast it and keep their CPUs: only the end of the cluster ends them for certain.
    """
    port = servers.free_port()
    exchange = grpc_exchange("works", values(AT_ONCE))

    def answers() -> bool:
        if not servers.accepts(port):
            return False
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                channel.unary_unary(exchange.path)(exchange.body, timeout=measure.CALL_LIMIT)
            except grpc.RpcError:  # The model does not serve yet.
                return False
        return True

    command = [sys.executable, "-m", "bench.rayserve", nodes.address, str(port)]
    log = folder / "log-serve"
    with servers.started(
        SERVE, command, answers, core=None, log=log, environment={}, start_limit=START_LIMIT
    ) as started:
        yield started, port


def hop(nodes: Nodes, plan: Plan, sizes: Sequence[int] = SIZES) -> dict[str, list[list[Round]]]:
    """Measure sequential calls of a model that does no work; returns rounds by kind of instance and by size."""
    settle = min(0.3, plan.seconds)
    ways = {way: {"execution": way} for way in ("thread", "process")} | {"ray": on_ray()}
    measured: dict[str, list[list[Round]]] = {name: [[] for _ in sizes] for name in (*ways, SERVE)}
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        started = {
            way: stack.enter_context(serving(nodes, way, parameters, 1, folder))[:2]
            for way, parameters in ways.items()
        }
        started[SERVE] = stack.enter_context(_serve(nodes, folder))
        for at, size in enumerate(sizes):
            subjects = []
            for way, (server, port) in started.items():
                exchange = grpc_exchange(way, values(AT_ONCE, 1, size // 4))
                subjects.append(Subject(way, server, port, exchange))
                subjects[-1].expected = measure.call_once(subjects[-1])
            for turn in range(plan.rounds + 1):
                for subject in subjects:
                    taken = asyncio.run(_one_by_one(subject, settle, plan.seconds if turn else settle))
                    if turn:  # The first round is a warm-up.
                        measured[subject.name][at].append(taken)
    return measured


async def _one_by_one(subject: Subject, settle: float, seconds: float) -> Round:
    requests = [Request(subject.exchange.body)]
    connections = await h2client.connect(subject.port, subject.exchange.path, requests, 1)
    return await measure.load_on(connections, subject, settle, seconds)


def hop_lines(measured: Mapping[str, Sequence[Sequence[Round]]], sizes: Sequence[int] = SIZES) -> Iterator[str]:
    """Yield the table."""
    header = ["instance"]
    for size in sizes:
        header += [f"{size:,} bytes: p50 µs", "p99 µs", "more µs than a thread", "(min-max)"]
    rows = []
    for way, by_size in measured.items():
        row = [way]
        for found, threads in zip(by_size, measured["thread"], strict=True):
            more = [(run.p50 - thread.p50) * 1e6 for run, thread in zip(found, threads, strict=True)]
            row += [f"{statistics.median(run.p50 for run in found) * 1e6:,.0f}"]
            row += [f"{statistics.median(run.p99 for run in found) * 1e6:,.0f}"]
            row += [f"{statistics.median(more):,.0f}", f"({min(more):,.0f}-{max(more):,.0f})"]
        rows.append(row)
    yield report.plain(header, rows)


# --- the whole bench ---


def _in_its_environment() -> None:
    """Restart this program in the environment that has Ray, which is created first if it is missing."""
    made = subprocess.run(
        [sys.executable, "tests/environments.py", "ray"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    python = made.stdout.strip()
    os.execv(python, [python, "-m", "bench.ray", *sys.argv[1:]])


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 5, 0.6)
    parser.add_argument("--losses", type=int, default=2, help="nodes that are killed (default: %(default)s)")
    arguments = parser.parse_args(words)
    if importlib.util.find_spec("ray") is None:
        _in_its_environment()
    plan = Plan(arguments.rounds, arguments.seconds)
    began = time.monotonic()
    print(*report.machine(), f"{plan.rounds} rounds of {plan.seconds:g} s, nothing pinned", sep="\n", flush=True)
    try:
        with servers.sigterm_raises_exit(), cluster(NODES) as nodes:
            for kind, lines in throughput(nodes, plan).items():
                print(f"\ncalls of {ROWS} rows, {IN_FLIGHT} in flight; the model {KINDS[kind]}")
                print(*throughput_lines(lines), sep="\n", flush=True)
            print(*raychanges.measured(nodes, arguments.losses, plan.seconds), sep="\n", flush=True)
            # Last, because of what Ray Serve leaves.
            print("\na model that does nothing, ModelInfer over gRPC, 1 in flight, nodes on this machine")
            print(f"{SERVE}: the same model as one replica, behind its own gRPC ingress")
            print(*hop_lines(hop(nodes, plan)), sep="\n", flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{LEGEND}\n{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
