"""Measures `triglot.client` on three servers of which one is killed, stopped, drained or slow.

From the repository's root: `python -m bench.failover --help`. A quarter of the calls is made before the event.
Counted are the calls that failed, and those that were sent beyond one a call: retries and hedges. A slow server
takes 50 times as long as the others.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import report, servers
from triglot.client import AsyncClient, Retries
from triglot.core.errors import ServingError

MODEL = """
import asyncio

import triglot


class Sleeps(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 16])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, 16])]
    instances = 64

    async def infer(self, inputs):
        await asyncio.sleep({seconds})
        return {{"y": inputs["x"]}}
"""
QUICK, SLOW = 0.002, 0.1
HEDGE_AFTER = 0.02
EVENTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "drained": signal.SIGTERM}
CASES = [(event, None) for event in (*EVENTS, "slow")] + [(event, HEDGE_AFTER) for event in (*EVENTS, "slow")]


@dataclass(frozen=True, slots=True)
class Found:
    """The calls that failed, by code, how many were sent beyond one a call, and a call's milliseconds."""

    failed: Counter[str]
    extra: int
    p50: float
    p99: float
    longest: float


@contextmanager
def three(slow: bool) -> Iterator[list[tuple[servers.Server, str]]]:
    """Run three servers; yields them with their addresses. The first is slow, if one is."""
    with ExitStack() as stack:
        running = []
        for seconds in (SLOW if slow else QUICK, QUICK, QUICK):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triglot-bench-")))
            model = folder / "models" / "sleeps" / "1"
            model.mkdir(parents=True)
            (model / "model.py").write_text(MODEL.format(seconds=seconds))
            server, port, _ = stack.enter_context(servers.serving(folder / "models", None))
            running.append((server, f"127.0.0.1:{port}"))
        yield running


async def measure(event: str, hedge_after: float | None, calls: int, in_flight: int) -> Found:
    """Make the calls, and let the event happen to the first server after a quarter of them."""
    retries = Retries(hedge_after=hedge_after, check_after=1.0)
    failed: Counter[str] = Counter()
    durations: list[float] = []
    numbers = iter(range(calls))
    with three(event == "slow") as running:
        first = running[0][0].process
        async with AsyncClient([address for _, address in running], retries=retries, timeout=30) as client:

            async def drive() -> None:
                for number in numbers:
                    if number == calls // 4 and event in EVENTS:
                        first.send_signal(EVENTS[event])
                    given = np.full((1, 16), number, np.float32)
                    began = time.perf_counter()
                    try:
                        if not np.array_equal((await client.infer("sleeps", {"x": given}))["y"], given):
                            failed["another call's answer"] += 1
                    except ServingError as error:
                        failed[error.code.name] += 1
                    durations.append((time.perf_counter() - began) * 1e3)

            await asyncio.gather(*(drive() for _ in range(in_flight)))
            extra = client.sent - calls
        if event == "stopped":
            first.send_signal(signal.SIGCONT)
    p50, p99 = np.percentile(durations, [50, 99])
    return Found(failed, extra, p50, p99, max(durations))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.failover", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=25_000, help="of each event (default: 25000)")
    parser.add_argument("--in-flight", type=int, default=16, help="calls at a time (default: 16)")
    options = parser.parse_args()
    rows = []
    for event, hedge_after in CASES:
        found = asyncio.run(measure(event, hedge_after, options.calls, options.in_flight))
        hedged = "never" if hedge_after is None else f"after {hedge_after * 1e3:.0f} ms"
        failures = " ".join(f"{code} {count}" for code, count in found.failed.items()) or "0"
        counts = (failures, f"{found.extra / options.calls:.2%}")
        rows.append((event, hedged, *counts, *(f"{ms:.1f}" for ms in (found.p50, found.p99, found.longest))))
    print(*report.machine(), f"{options.calls} calls each, {options.in_flight} in flight, three servers", sep="\n")
    columns = ("one server is", "hedges", "failed", "extra calls", "p50 ms", "p99 ms", "longest ms")
    print(report.plain(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
