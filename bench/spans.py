"""Measures what OpenTelemetry spans cost, and the effects on calls and spans of a slow or absent collector.

From the repository's root: `python -m bench.spans --help`. Small, different ModelInfer calls over gRPC, each with
a trace context of its own, in turn on servers that export no spans, that export only sampled calls when none is
sampled, and that export the spans of every call; then on servers whose collector is slow, absent, or restarted.
"""

import argparse
import asyncio
import http.client
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench import measure, payloads, report, rounds, servers, traffic
from bench.measure import Subject
from bench.payloads import framed
from bench.rounds import Measured, Plan
from bench.scenarios import SCENARIOS
from bench.tally import BenchError

MODEL = "identity_fp32"
SCENARIO = next(scenario for scenario in SCENARIOS if scenario.name == "infer-c64")
OFF, UNSAMPLED, SAMPLED = "off", "parent not sampled", "every call"
SLOW, DEAD, BACK = "takes 1 s", "is not there", "goes and comes back"
SLOW_SECONDS = 1.0
DELAY_MS = 500
"""Longest time that a span waits for others."""
COLUMNS = ("spans", "calls/s", "x off", "(min-max)", "p50 ms", "p99 ms", "CPU µs", "x off", "client")
GOALS = "goals: CPU x 1.01 of off with parents that are not sampled, x 1.10 with every call sampled"
LEGEND = """\
Medians over rounds, in turn, one at a time; "x off" is the median of the rounds' own ratios to the line that
exports none. Every call has a traceparent of its own, an id and a deadline. "!": the client was the limit."""


@dataclass(slots=True)
class SpanCounts:
    """Numbers of spans at the end: exported and lost by the server, and received by its collector."""

    exported: int
    lost: int
    received: int


@dataclass(slots=True)
class Faulty:
    """Results of a server with a faulty collector: p99 of its calls, and of a server with a healthy one's."""

    what: str
    healthy: list[float] = field(default_factory=list)
    faulty: list[float] = field(default_factory=list)
    calls: int = 0
    span_counts: SpanCounts | None = None


class Collector:
    """A process `bench.collector`, on the client's core."""

    def __init__(self, folder: Path, core: int | None, stack: ExitStack, *, delay: float = 0.0) -> None:
        self.port = servers.free_port()
        self.file = folder / f"spans-{self.port}"
        self._folder, self._core, self._delay = folder, core, delay
        self._stack = stack
        self._running = ExitStack()
        self._before = 0
        """Spans that earlier processes received."""
        stack.callback(self.stop)

    def start(self) -> None:
        """Start the process, whose count begins at 0; an earlier one is ended."""
        self.stop()
        self._before = self.received
        command = [sys.executable, "-m", "bench.collector", "--port", str(self.port)]
        command += ["--count-file", str(self.file), "--delay", str(self._delay)]
        self.file.unlink(missing_ok=True)
        self._running.enter_context(
            servers.started(
                "bench.collector",
                command,
                lambda: servers.accepts(self.port),
                core=self._core,
                log=self._folder / f"log-{self.port}",
                environment={},
            )
        )

    def stop(self) -> None:
        """End the process."""
        self._running.close()

    @property
    def received(self) -> int:
        """Number of spans that all its processes received."""
        text = self.file.read_text() if self.file.exists() else ""
        return self._before + int(text or 0)


class Traced:
    """A server that exports spans, and its collector."""

    def __init__(self, name: str, folder: Path, cores: servers.Cores, stack: ExitStack, kind: str) -> None:
        self.collector = Collector(folder, cores.client, stack, delay=SLOW_SECONDS if kind == SLOW else 0.0)
        if kind != DEAD:
            self.collector.start()
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.collector.port}",
            "OTEL_BSP_SCHEDULE_DELAY": str(DELAY_MS),
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2000",
        }
        server, port, self._rest = stack.enter_context(
            rounds.serving_models(cores.server, environment=environment)
        )
        self.subject = subject_of(name, server, port, sampled=kind != UNSAMPLED)

    def span_counts(self) -> SpanCounts:
        """Wait until no more spans are in flight; returns their numbers."""
        before: dict[str, float] = {}
        for _ in range(60):
            found = self._metrics()
            if found == before:
                break
            before = found
            time.sleep(3)  # Longer than an export may take.
        exported = int(before.pop("triglot_spans_exported_total"))
        return SpanCounts(exported, int(sum(before.values())), self.collector.received)

    def _metrics(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._rest, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return {name: float(value) for name, value in re.findall(r"^(triglot_spans_\S+) (\S+)$", text, re.M)}


def subject_of(name: str, server: servers.Server, port: int, *, sampled: bool) -> Subject:
    """Return the subject: a server, and the requests that its clients send."""
    varied = traffic.Traffic(sampled=sampled)
    made = traffic.exchanges(payloads.grpc_exchange, (MODEL,), 16, varied)
    subject = Subject(name, server, port, made[0], framed([made[0].reply]))
    subject.requests = traffic.requests(made, varied, port)
    return subject


async def costs(subjects: Sequence[Subject], plan: Plan) -> list[Measured[str]]:
    """Measure all subjects in turn, round by round."""
    return await rounds.interleaved(
        subjects, plan, lambda subject, settle, seconds: measure.load(SCENARIO, subject, settle, seconds)
    )


async def fault(healthy: Traced, faulty: Traced, what: str, plan: Plan) -> Faulty:
    """Load both servers in turn; a collector that is restarted is absent in every second round."""
    measured = Faulty(what)
    settle = min(0.5, plan.seconds / 4)
    for number in range(plan.rounds):
        if what == BACK:
            faulty.collector.stop() if number % 2 else faulty.collector.start()
        for served, kept in ((healthy, measured.healthy), (faulty, measured.faulty)):
            taken = await measure.load(SCENARIO, served.subject, settle, plan.seconds)
            kept.append(taken.p99)
    measured.span_counts = faulty.span_counts()
    return measured


def fault_lines(measured: Faulty) -> Iterator[str]:
    """Yield the lines to print."""
    before, now = (statistics.median(times) * 1e3 for times in (measured.healthy, measured.faulty))
    ratios = [time / another for time, another in zip(measured.faulty, measured.healthy, strict=True)]
    yield f"a collector that {measured.what}:"
    yield f"  p99 {before:.2f} ms beside a healthy one, {now:.2f} ms: x{statistics.median(ratios):.2f}, goal 1.10"
    span_counts = measured.span_counts
    assert span_counts is not None
    yield (
        f"  {span_counts.exported:,} spans exported, {span_counts.lost:,} counted as lost; "
        f"the collector has {span_counts.received:,}"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.spans", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 9, 1.0)
    arguments = parser.parse_args(words)
    plan = Plan(arguments.rounds, arguments.seconds)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    print(*report.machine(), f"{plan.rounds} rounds of {plan.seconds:g} s; {cores.note}", sep="\n", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name, ExitStack() as stack:
            folder = Path(name)
            server, port, _ = stack.enter_context(rounds.serving_models(cores.server))
            every = Traced(SAMPLED, folder, cores, stack, SAMPLED)
            subjects = [
                subject_of(OFF, server, port, sampled=True),
                Traced(UNSAMPLED, folder, cores, stack, UNSAMPLED).subject,
                every.subject,
            ]
            measured = asyncio.run(costs(subjects, plan))
            table = report.plain(COLUMNS, [rounds.row(measurement, measured[0]) for measurement in measured])
            print(f"\n{SCENARIO.in_flight} in flight; {GOALS}", table, LEGEND, sep="\n", flush=True)
            for kind in (SLOW, DEAD, BACK):
                faulty = Traced(kind, folder, cores, stack, kind)
                print("", *fault_lines(asyncio.run(fault(every, faulty, kind, plan))), sep="\n", flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
