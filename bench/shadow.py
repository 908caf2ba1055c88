"""Measures what a shadow costs the callers: latency, and the server's CPU time per call, with and without one.

From the repository's root: `python -m bench.shadow --help`. The shadow gets a copy of each call, and takes ten
times as long as the model; both sleep. Copies that do not fit are dropped, and the CPU time of those that run is
shared by them, too: what remains is the callers'. Rounds without and with a shadow alternate on one server. Then
calls are counted at weights of 90 and 10. With `--payload-log` it measures what a payload log costs the callers
when its receiver reads nothing: rounds alternate on two servers.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import h2client, servers
from bench.payloads import framed, grpc_exchange, tensor
from bench.tally import BenchError, Request, close, drive

MODEL = """
import time

import triglot


class Sleeps(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 16])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, 16])]
    instances = 8

    def infer(self, inputs):
        time.sleep({seconds})
        return {{"y": inputs["x"]}}
"""
SECONDS = {"served/1": 0.002, "served/2": 0.02, "weighted/1": 0.0, "weighted/2": 0.0}
"""What each version takes; those of no time do not sleep."""
IN_FLIGHT = 8
WEIGHTS = {"1": 90, "2": 10}


@dataclass(frozen=True, slots=True)
class Round:
    """p50 and p99 of the callers in milliseconds, and the server's CPU microseconds per call or copy that ran."""

    p50: float
    p99: float
    cpu: float


class Calls:
    """Calls of a running server."""

    def __init__(self, server: servers.Server, grpc_port: int, rest_port: int) -> None:
        self._server = server
        self._grpc_port = grpc_port
        self._rest_port = rest_port

    def traffic(self, model: str, change: Any = None) -> Any:
        """Return the traffic of a model, after a change, if one is given."""
        data = None if change is None else json.dumps(change).encode()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._rest_port}/v2/models/{model}/traffic", data
        ) as reply:
            return json.load(reply)

    async def drive(self, model: str, seconds: float) -> tuple[Round, int]:
        """Call a model for some seconds; return what was measured, and the number of calls."""
        exchange = grpc_exchange(model, tensor(1, 16))
        connections = await h2client.connect(self._grpc_port, exchange.path, [Request(exchange.body)], IN_FLIGHT)
        try:
            before = self._server.cpu_seconds() or 0.0
            outcome = await drive(connections, seconds, framed([exchange.reply]))
            cpu = (self._server.cpu_seconds() or 0.0) - before
        finally:
            await close(*connections)
        p50, p99 = np.percentile(outcome.latencies, (50, 99)) * 1e3
        return Round(p50, p99, cpu / outcome.calls * 1e6), outcome.calls


async def shadow_lines(calls: Calls, rounds: int, seconds: float) -> list[str]:
    """Alternate rounds without and with the shadow; return the lines to print."""
    calls.traffic("served", {"traffic": {"1": 100}})
    await calls.drive("served", 1.0)  # Warm-up, not counted.
    found: dict[str, list[Round]] = {"none": [], "shadow": []}
    copies = 0
    for _ in range(rounds):
        for name, measured in found.items():
            calls.traffic("served", {"shadow": {"version": "2"} if name == "shadow" else None})
            round_, made = await calls.drive("served", seconds)
            ran = 0
            if name == "shadow":
                await asyncio.sleep(2.0)  # The last copies end.
                verdict = calls.traffic("served")["shadow"]["verdict"]
                dropped, ran = sum(verdict["dropped"].values()), verdict["compared"] + verdict["failed"]
                copies += ran
                if (total := ran + dropped) != made:
                    raise BenchError(f"{total} copies are counted, of {made} calls: {verdict}")
            measured.append(replace(round_, cpu=round_.cpu * made / (made + ran)))
    return [*lines_of(found, "call or copy"), f"{copies} copies ran"]


async def payload_lines(found: Mapping[str, Calls], rounds: int, seconds: float) -> list[str]:
    """Alternate rounds on a server without a payload log and on one with it; return the lines to print."""
    for calls in found.values():
        calls.traffic("weighted", {"traffic": {"1": 100}})
        await calls.drive("weighted", 1.0)  # Warm-up, not counted.
    measured: dict[str, list[Round]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, calls in found.items():
            measured[name].append((await calls.drive("weighted", seconds))[0])
    return lines_of(measured, "call")


def lines_of(found: Mapping[str, Sequence[Round]], unit: str) -> list[str]:
    """Return the lines about the best rounds of two kinds, and how the second compares with the first."""
    best = {
        name: Round(*(min(getattr(found_round, key) for found_round in measured) for key in ("p50", "p99", "cpu")))
        for name, measured in found.items()
    }
    texts = [
        f"{name}: p50 {at.p50:.2f} ms, p99 {at.p99:.2f} ms, {at.cpu:.0f} µs of CPU per {unit}"
        for name, at in best.items()
    ]
    first, second = best.values()
    return [*texts, f"p99 ×{second.p99 / first.p99:.3f}, CPU ×{second.cpu / first.cpu:.3f}"]


async def weight_line(calls: Calls, least: int) -> str:
    """Count calls at weights of 90 and 10; return the line to print."""
    calls.traffic("weighted", {"traffic": WEIGHTS})
    made = 0
    while made < least:
        made += (await calls.drive("weighted", 5.0))[1]
    counts = {row["version"]: row["requests"] for row in calls.traffic("weighted")["versions"]}
    made = sum(counts.values())
    return f"weights 90/10: {made} calls, {100 * counts[2] / made:.3f} % to version 2"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shadow", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds without and with a shadow (default: 5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a round (default: 5)")
    parser.add_argument("--calls", type=int, default=100_000, help="calls at weights of 90/10 (default: 100000)")
    parser.add_argument(
        "--payload-log",
        action="store_true",
        help="in place of these, measure a payload log with a blocked receiver",
    )
    options = parser.parse_args()
    cores = servers.choose_cores()
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as folder:
        for name, seconds in SECONDS.items():
            version = Path(folder) / "models" / name
            version.mkdir(parents=True)
            text = MODEL if seconds else MODEL.replace("        time.sleep({seconds})\n", "").replace("8", "1")
            (version / "model.py").write_text(text.format(seconds=seconds))
        servers.pin(cores.client)
        models = Path(folder) / "models"
        with servers.serving(models, cores.server) as running:
            calls = Calls(*running)
            if options.payload_log:
                # Connections to it are made, and nothing reads them.
                with socket.create_server(("127.0.0.1", 0)) as receiver:
                    flags = ("--payload-log", f"http://127.0.0.1:{receiver.getsockname()[1]}")
                    with servers.serving(models, cores.server, flags) as logging:
                        kinds = {"none": calls, "payload log": Calls(*logging)}
                        lines = asyncio.run(payload_lines(kinds, options.rounds, options.seconds))
            else:
                lines = asyncio.run(shadow_lines(calls, options.rounds, options.seconds))
                lines.append(asyncio.run(weight_line(calls, options.calls)))
            print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
