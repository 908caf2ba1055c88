"""Measures a server that loads its models on demand: many models, room for few, calls by Zipf's law.

From the repository's root: `python -m bench.on_demand --help`. It counts failed calls, compares the server's
memory with its limit, and the share of calls that found their model in memory with that of a simulated LRU cache
of as many models, for the same sequence of calls.
"""

import argparse
import os
import re
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench import report, servers
from bench.lifecycle import MODEL
from triglot.core.errors import ServingError
from triglot.testing import KServeGrpc

MIB = 2**20
SPARE = 1.05
"""What a model may take in memory, for each byte of its file."""
MEMORY_GOAL, HIT_GOAL = 1.1, 0.01
"""The memory over its limit, and the hits below those of the simulated cache, that are still good."""
_LOADED = re.compile(r" loaded m\d+ version ")


def write_models(root: Path, count: int, megabytes: int) -> None:
    """Write models that read weights of this size; their files are links to one."""
    weights = root.parent / "weights.npy"
    np.save(weights, np.ones(megabytes * MIB // 4, np.float32))
    for number in range(count):
        version = root / f"m{number}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        os.link(weights, version / "weights.npy")


def simulated(trace: Sequence[int], room: int) -> int:
    """Return the loads of an LRU cache with room for so many models."""
    cache: OrderedDict[int, None] = OrderedDict()
    loads = 0
    for number in trace:
        if number not in cache:
            loads += 1
            if len(cache) == room:
                cache.popitem(last=False)
        cache[number] = None
        cache.move_to_end(number)
    return loads


def zipf(models: int, seed: int) -> Iterator[int]:
    """Yield models, the n-th of them with a chance of 1/n."""
    weights = 1 / np.arange(1, models + 1)
    random = np.random.default_rng(seed)
    while True:
        yield from random.choice(models, 10_000, p=weights / weights.sum()).tolist()


def run(models: int, megabytes: int, room: int, seconds: int, clients: int, cores: servers.Cores) -> Iterator[str]:
    """Call models for so many seconds; yield lines to print, those of missed goals with "missed"."""
    limit, latencies, failures, trace = int(room * megabytes * MIB * SPARE), [], [], []
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        root, log = Path(name) / "r", Path(name) / "log"
        write_models(root, models, megabytes)
        grpc, rest = servers.free_port(), servers.free_port()
        command = [sys.executable, "-m", "triglot", "serve", str(root), "--load-on-demand"]
        command += ["--max-loaded-models", str(room), "--max-model-memory", str(limit), "--drain-delay", "0"]
        command += ["--grpc-port", str(grpc), "--rest-port", str(rest)]
        calls, lock, end = zipf(models, seed=1), threading.Lock(), time.perf_counter() + seconds

        def client(_: int) -> None:
            x = np.zeros((1, 16), np.float32)
            with KServeGrpc(f"127.0.0.1:{grpc}") as caller:
                while (began := time.perf_counter()) < end:
                    with lock:
                        trace.append(number := next(calls))
                    try:
                        caller.infer(f"m{number}", {"x": x})
                    except ServingError as error:
                        failures.append(str(error))
                    latencies.append(time.perf_counter() - began)

        with servers.started(
            "triglot", command, lambda: servers.answers_ready(rest), core=cores.server, log=log, environment={}
        ) as server:
            idle, end = server.resident_bytes() or 0, time.perf_counter() + seconds
            with ThreadPoolExecutor(clients) as threads:
                list(threads.map(client, range(clients)))
            used, cpu = (server.peak_bytes() or 0) - idle, server.cpu_seconds() or 0.0
        loads = len(_LOADED.findall(log.read_text()))
    hits, simulated_hits = (1 - count / len(trace) for count in (loads, simulated(trace, room)))

    def goal(text: str, *, met: bool) -> str:
        return f"(goal: {text}{'' if met else ', missed'})"

    yield f"{len(trace)} calls, {len(failures)} failed {goal('0', met=not failures)}"
    yield from sorted(set(failures))[:3]
    yield f"{hits:.2%} found their model in memory, in a simulated LRU cache {simulated_hits:.2%} " + goal(
        f"at most {HIT_GOAL:.0%} less", met=hits >= simulated_hits - HIT_GOAL
    )
    yield f"memory for models at most {used / MIB:.0f} MiB, {used / limit:.2f} of max_model_memory " + goal(
        f"at most {MEMORY_GOAL}", met=used <= MEMORY_GOAL * limit
    )
    median, p99 = np.percentile(latencies, (50, 99)) * 1e3
    yield f"a call took {median:.1f} ms (p99 {p99:.0f} ms); {loads} loads, {cpu:.1f} s of the server's CPU time"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after a missed goal, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.on_demand", description=__doc__.splitlines()[0])
    for flag, default, help_text in (
        ("--models", 300, "models"),
        ("--megabytes", 20, "MiB of a model's weights"),
        ("--room", 30, "models that have room"),
        ("--seconds", 600, "how long the clients call"),
        ("--clients", 4, "calls at a time"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{help_text} (default: %(default)s)")
    of = parser.parse_args(words)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    what = f"{of.models} models of {of.megabytes} MiB, room for {of.room}, {of.clients} calls at a time"
    print(*report.machine(), f"{what}; {cores.note}", "", sep="\n", flush=True)
    printed = list(run(of.models, of.megabytes, of.room, of.seconds, of.clients, cores))
    print(*printed, sep="\n")
    return int(any("missed" in line for line in printed))


if __name__ == "__main__":
    sys.exit(main())
