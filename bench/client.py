"""Measures `triglot.client` with tritonclient's gRPC clients: small calls, calls of 16 MiB, import and memory.

From the repository's root: `python -m bench.client --help`. Both have numpy arrays in and out, in one process of
tritonclient's environment, against one server; rounds of each alternate, one after the other. So do calls with
arrays in shared memory and without. Import time and memory are those of new processes that import only one; grpcio
with numpy, which both need, is the least possible.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import servers
from bench.report import plain
from bench.servers import ROOT
from bench.tally import BenchError
from triglot.client import AsyncClient, Client
from triglot.client.shared_memory import PREFIX
from triglot.core.tensor import Array

ENVIRONMENT = "tritonclient"
MODEL, INPUT, OUTPUT = "identity_fp32", "x", "y"
CASES = [(size, kind, 1) for size in ("small", "16 MiB") for kind in ("blocking", "asyncio")]
CASES.insert(2, ("small", "asyncio", 16))
SIZES = {"small": (1, 16), "16 MiB": (1, 2**22)}
MODULES = ("triglot.client", "tritonclient.grpc", "numpy, grpc")
START = """
import time
began = time.process_time()
import {}
print(time.process_time() - began)
print(*(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""
Call = Callable[[Array], Awaitable[Array]]


@asynccontextmanager
async def clients(address: str) -> AsyncIterator[dict[str, tuple[Call, Call]]]:
    """Yield calls by this client and by tritonclient, blocking and asyncio."""
    from tritonclient import grpc as stock  # noqa: PLC0415 - only its environment has it.
    from tritonclient.grpc import aio as stock_aio  # noqa: PLC0415

    def given(array: Array) -> list[Any]:
        return [stock.InferInput(INPUT, array.shape, "FP32").set_data_from_numpy(array)]

    async with AsyncClient(address) as ours, stock_aio.InferenceServerClient(address) as theirs:
        with Client(address) as ours_blocking, stock.InferenceServerClient(address) as theirs_blocking:

            async def call_ours(array: Array) -> Array:
                return (await ours.infer(MODEL, {INPUT: array}))[OUTPUT]

            async def call_theirs(array: Array) -> Any:
                return (await theirs.infer(MODEL, given(array))).as_numpy(OUTPUT)

            async def block_on_ours(array: Array) -> Array:
                return ours_blocking.infer(MODEL, {INPUT: array})[OUTPUT]

            async def block_on_theirs(array: Array) -> Any:
                return theirs_blocking.infer(MODEL, given(array)).as_numpy(OUTPUT)

            yield {"blocking": (block_on_ours, block_on_theirs), "asyncio": (call_ours, call_theirs)}


async def measure(call: Call, array: Array, in_flight: int, seconds: float) -> tuple[float, float]:
    """Return the milliseconds of a call, wall clock and CPU, for calls that take about so many seconds."""
    total = 0
    until = time.perf_counter() + seconds

    async def drive() -> None:
        nonlocal total
        while time.perf_counter() < until:
            await call(array)
            total += 1

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(drive() for _ in range(in_flight)))
    return (time.perf_counter() - began) / total * 1e3, (time.process_time() - used) / total * 1e3


async def compare(
    pair: tuple[Call, Call], arrays: tuple[Array, Array], in_flight: int, rounds: int, seconds: float
) -> list[str]:
    """Return the cells of a row: of both calls the median milliseconds and their ratio, wall clock and CPU."""
    for call, array in zip(pair, arrays, strict=True):
        if not np.array_equal(await call(array), array):
            raise BenchError("the response is another array than the request's")
    found = [
        [await measure(call, array, in_flight, seconds) for call, array in zip(pair, arrays, strict=True)]
        for _ in range(rounds)
    ]
    cells = []
    for at in (0, 1):
        columns = ([first[at] for first, _ in found], [second[at] for _, second in found])
        ratios = [first / second for first, second in zip(*columns, strict=True)]
        cells += [f"{statistics.median(values):.3f}" for values in (*columns, ratios)]
    return cells


async def calls(address: str, rounds: int, seconds: float) -> None:
    """Print the table of calls."""
    table = []
    async with clients(address) as pairs:
        for size, kind, in_flight in CASES:
            array = np.random.default_rng(1).random(SIZES[size], np.float32)
            cells = await compare(pairs[kind], (array, array), in_flight, rounds, seconds)
            table.append((f"{size}, {kind}, {in_flight} in flight", *cells))
    print(plain(("ms a call", "triglot", "tritonclient", "x", "CPU", "tritonclient", "x"), table))


async def shared_memory(address: str, rounds: int, seconds: float) -> None:
    """Print what calls cost with arrays in shared memory, against arrays that are sent."""
    shape = SIZES["16 MiB"]
    sent = np.random.default_rng(1).random(shape, np.float32)
    with Client(address) as client, client.shared_memory(2 * sent.nbytes) as memory:
        shared, written = memory.array(shape, sent.dtype), memory.array(shape, sent.dtype)
        shared[:] = sent

        async def share(array: Array) -> Array:
            return client.infer(MODEL, {INPUT: array}, outputs={OUTPUT: written})[OUTPUT]

        async def send(array: Array) -> Array:
            return client.infer(MODEL, {INPUT: array})[OUTPUT]

        cells = await compare((share, send), (shared, sent), 1, rounds, seconds)
    print(plain(("ms a call", "shared memory", "sent", "x", "CPU", "sent", "x"), [("16 MiB, blocking", *cells)]))


def starts(rounds: int) -> None:
    """Print CPU seconds and memory of a process that imports a client."""
    found: dict[str, list[list[float]]] = {module: [] for module in MODULES}
    for _ in range(rounds):
        for module, values in found.items():
            done = subprocess.run(
                [sys.executable, "-c", START.format(module)], stdout=subprocess.PIPE, text=True, check=True
            )
            values.append([float(word) for word in done.stdout.split()])
    best = {module: [min(column) for column in zip(*values, strict=True)] for module, values in found.items()}
    base = best["tritonclient.grpc"]
    rows = [
        (module, f"{cpu:.3f}", f"{cpu / base[0]:.2f}", f"{size:.0f}", f"{size / base[1]:.2f}")
        for module, (cpu, size) in best.items()
    ]
    print(plain(("import", "CPU s", "x tritonclient", "MiB", "x tritonclient"), rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.client", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each (default: 7)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round (default: 2)")
    parser.add_argument("--address", help="of a running server that has the bench's models; else one is started")
    options = parser.parse_args()
    if options.address:
        asyncio.run(calls(options.address, options.rounds, options.seconds))
        asyncio.run(shared_memory(options.address, options.rounds, options.seconds))
        starts(options.rounds)
        return 0
    command = [sys.executable, "tests/environments.py", ENVIRONMENT]
    python = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    cores = servers.choose_cores()
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as folder:
        models = Path(folder) / "models"  # The server's log is written beside it.
        models.symlink_to(ROOT / "bench" / "models")
        with servers.serving(models, cores.server, ("--shared-memory-prefix", PREFIX)) as (_, port, _):
            servers.pin(cores.client)
            again = [python, "-m", "bench.client", "--address", f"127.0.0.1:{port}", *sys.argv[1:]]
            return subprocess.run(again, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
