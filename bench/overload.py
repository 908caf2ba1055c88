"""Measures how a server behaves that is offered several times the load that its model can serve.

From the repository's root: `python -m bench.overload --help`. The capacity is measured before and after, with
enough calls in flight to fill the batches. Between the two, calls arrive at random instants over gRPC, whether or
not earlier ones have ended, so the queue is always full; others query the server's health and metadata.
"""

import argparse
import asyncio
import http.client
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import affine, h2client, holding, openclient, probes, report, servers
from bench.affine import Batching
from bench.payloads import Exchange, framed, grpc_exchange, tensor
from bench.probes import Probe
from bench.tally import BenchError, Request, close, drive

MODEL = "busy"
INSTANCES = 4
"""Instances of the model that holds the GIL."""
SAMPLES = 6
"""Number of times that the resident size is read."""
REQUESTS = re.compile(r'triglot_requests_total\{.*code="(\w+)".*method="ModelInfer".*\} (\S+)')


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings from the command line."""

    seconds: float
    times: float
    """Offered load as a multiple of the server's capacity."""
    fixed: float
    per_row: float
    max_batch_size: int
    queue: int


@dataclass(slots=True)
class Result:
    """Results of one run."""

    capacity: tuple[float, float]
    """Calls per second, before and after the overload."""
    offered: float
    outcome: openclient.Offered
    probes: dict[str, list[float]] = field(default_factory=dict)
    resident: list[int | None] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        return len(self.outcome.good) / self.outcome.seconds


@dataclass(frozen=True, slots=True)
class Serving:
    """The server, and its ports."""

    server: servers.Server
    grpc_port: int
    rest_port: int

    def codes(self) -> Counter[str]:
        """Return the number of ModelInfer calls that ended with each code, from the server's metrics."""
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return Counter({code: int(float(value)) for code, value in REQUESTS.findall(text)})


@contextmanager
def _serving(plan: Plan, core: int | None) -> Iterator[Serving]:
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        folder = Path(name)
        affine.write(
            folder / "models" / MODEL,
            Batching("delay 0"),
            fixed=plan.fixed,
            per_row=plan.per_row,
            max_batch_size=plan.max_batch_size,
            max_queue_size=plan.queue,
        )
        with servers.serving(folder / "models", core) as started:
            yield Serving(*started)


async def _capacity(port: int, exchange: Exchange, plan: Plan, seconds: float) -> float:
    """Return the calls per second when every batch is full, and no call is rejected."""
    in_flight = min(4 * plan.max_batch_size, plan.queue)
    connections = await h2client.connect(port, exchange.path, [Request(exchange.body)], in_flight)
    try:
        await drive(connections, seconds / 4, framed([exchange.reply]))
        outcome = await drive(connections, seconds, framed([exchange.reply]))
    finally:
        await close(*connections)
    return outcome.calls / outcome.seconds


async def _samples(server: servers.Server, seconds: float) -> list[int | None]:
    sizes = []
    for _ in range(SAMPLES):
        await asyncio.sleep(seconds / SAMPLES)  # Interval of the samples.
        sizes.append(server.resident_bytes())
    return sizes


async def _overload(serving: Serving, exchange: Exchange, asked: Sequence[Probe], plan: Plan) -> Result:
    port, brief = serving.grpc_port, max(0.5, plan.seconds / 6)
    before = await _capacity(port, exchange, plan, brief)
    serving_codes = serving.codes()
    offered = plan.times * before
    connection = await openclient.connect(port, exchange.path, exchange.body, exchange.reply)
    try:
        outcome, resident, latencies = await asyncio.gather(
            openclient.offer(connection, offered, plan.seconds),
            _samples(serving.server, plan.seconds),
            probes.run(asked, port, serving.rest_port, plan.seconds),
        )
    finally:
        await close(connection)
    codes = serving.codes()
    codes.subtract(serving_codes)
    after = await _capacity(port, exchange, plan, brief)
    return Result((before, after), offered, outcome, latencies, resident, codes)


def measure(plan: Plan, core: int | None) -> Result:
    """Start a server, and overload it."""
    exchange = grpc_exchange(MODEL, tensor(1, 16))
    with _serving(plan, core) as serving:
        return asyncio.run(_overload(serving, exchange, probes.of_model(serving.grpc_port, MODEL), plan))


def lines(result: Result) -> Iterator[str]:
    """Yield the lines to print."""
    before, after = result.capacity
    capacity = (before + after) / 2
    yield f"capacity {before:,.0f} calls/s before, {after:,.0f} after"
    times = f"{result.offered / capacity:.1f} times the capacity"
    yield f"offered {result.offered:,.0f} calls/s for {result.outcome.seconds:.0f} s, {times}"
    yield f"goodput {result.goodput:,.0f} calls/s, {result.goodput / capacity:.2f} of the capacity, goal 0.90"
    yield f"  answered: {probes.times(result.outcome.good)}"
    yield f"refused {len(result.outcome.refused):,}: {probes.times(result.outcome.refused)}, goal 20 ms"
    yield f"  of this the client's own, at most: {result.outcome.latest * 1e3:.1f} ms"
    code_counts = ", ".join(f"{number:,} {code}" for code, number in sorted(result.codes.items()) if number)
    yield f"codes, as the server counts them: {code_counts}"
    for name, latencies in result.probes.items():
        yield f"{name} meanwhile: {probes.times(latencies)}, goal p99 {probes.GOAL * 1e3:.0f} ms"
    sizes = ", ".join("n/a" if size is None else f"{size / 2**20:.0f}" for size in result.resident)
    yield f"resident MiB, at {SAMPLES} points: {sizes}"


# --- a model that holds the GIL ---


class Insisting(h2client.H2Connection):
    """Retries calls that were rejected by the full queue: an instance that has sent a reply may not have taken its
    next request yet."""

    refused = 0

    def _wrong(self, call: h2client.OpenCall) -> None:
        if call.received or call.offset != len(call.body) or self.tally is None:
            super()._wrong(call)
            return
        self.refused += 1
        if time.perf_counter() < self.tally.deadline:
            self._start()
        else:
            self.tally.close_slot()


@dataclass(frozen=True, slots=True)
class Held:
    """Results while every instance ran pure Python code, and the queue was full."""

    latencies: list[float]
    refused: int
    probes: dict[str, list[float]]


async def _hold(serving: Serving, exchange: Exchange, plan: Plan) -> Held:
    """Keep as many calls in flight as run in instances and fit into the queue."""
    port = serving.grpc_port
    asked = probes.of_model(port, MODEL)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Insisting(
            h2client.framed_requests([Request(exchange.body)]),
            plan.queue + INSTANCES,
            h2client.headers_of(port, exchange.path),
        ),
        "127.0.0.1",
        port,
    )
    try:
        async with asyncio.timeout(10):
            await connection.ready
        brief = max(0.2, plan.seconds / 6)
        driven = asyncio.ensure_future(drive([connection], plan.seconds + brief, framed([exchange.reply])))
        await asyncio.sleep(brief)  # until the queue is full
        latencies = await probes.run(asked, port, serving.rest_port, plan.seconds)
        outcome = await driven
    finally:
        await close(connection)
    return Held(outcome.latencies, connection.refused, latencies)


def hold(plan: Plan, core: int | None) -> Held:
    """Start a server whose model holds the GIL, and fill its queue."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"
        holding.write(models / MODEL / "1", INSTANCES, max_queue_size=plan.queue)
        with servers.serving(models, core) as started:
            return asyncio.run(_hold(Serving(*started), grpc_exchange(MODEL, tensor(1, 16)), plan))


def held_lines(held: Held) -> Iterator[str]:
    """Yield the lines to print."""
    yield f"answered {len(held.latencies):,}: {probes.times(held.latencies)}; refused {held.refused:,}"
    for name, latencies in held.probes.items():
        yield f"{name} meanwhile: {probes.times(latencies)}, goal p99 {probes.GOAL * 1e3:.0f} ms"


def parse(words: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of overload (default: %(default)s)")
    parser.add_argument("--times", type=float, default=3.0, help="the capacity (default: %(default)s)")
    parser.add_argument("--fixed", type=float, default=0.01, help="seconds of a batch (default: %(default)s)")
    parser.add_argument("--per-row", type=float, default=0.0005, help="and of a row (default: %(default)s)")
    parser.add_argument("--max-batch-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait (default: %(default)s)")
    given = parser.parse_args(words)
    return Plan(given.seconds, given.times, given.fixed, given.per_row, given.max_batch_size, given.queue)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    plan = parse(words)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    what = f"a model that sleeps {plan.fixed * 1e3:g} ms + {plan.per_row * 1e3:g} ms·n for n rows, 1 instance, "
    what += f"max_batch_size {plan.max_batch_size}, {plan.queue} requests may wait; {cores.note}"
    print(*report.machine(), what, "", sep="\n", flush=True)
    try:
        print(*lines(measure(plan, cores.server)), sep="\n", flush=True)
        what = f"a model in pure Python, {INSTANCES} instances, {plan.queue} requests may wait"
        print(f"\n{what}; {plan.queue + INSTANCES} in flight", *held_lines(hold(plan, cores.server)), sep="\n")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
