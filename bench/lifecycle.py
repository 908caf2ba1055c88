"""Measures the server's start and memory at rest, and how long new versions take to serve.

It also measures how the loading of a version affects calls of another model.

From the repository's root: `python -m bench.lifecycle --help`. The server is started with 18 small models. Then
one model is called continuously, while new versions of another one
are renamed into place, one after the other, and served by polling or by RepositoryModelLoad.
"""

import argparse
import asyncio
import http.client
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import h2client, report, servers
from bench.payloads import framed, grpc_exchange, tensor
from bench.tally import BenchError, Request, close, drive
from triglot.config.options import GRPC_TRANSPORTS

MODELS = Path(__file__).parent / "models"
MODELS = servers.ROOT / "tests" / "models_plain"
STEADY, CHANGING = "identity_fp32", "changing"
SLICE_SECONDS = 0.25
LOAD_LIMIT = 60.0
PAUSE_SECONDS = 0.5
"""Seconds between the time when a version serves and the next version."""
STARTS = 7
START_LIMIT = 30.0
REST_SECONDS = 1.0
"""Seconds from the start until the resident size is read."""
LOOK_SECONDS = 0.02
"""Interval of the readiness checks of a new version, and so the resolution of the times with polling."""

MODEL = """
from pathlib import Path

import numpy as np
import triglot


class Changing(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 16])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, 16])]

    def load(self, folder: Path) -> None:
        self.weights = np.load(folder / "weights.npy")

    def infer(self, inputs):
        return {"y": inputs["x"] + self.weights[0]}
"""


@dataclass(frozen=True, slots=True)
class Control:
    """A way to make the server load a new version: the server's flags, and the action after the renaming."""

    name: str
    flags: Sequence[str]
    serve: Callable[[int, int], Awaitable[None]]
    """`serve(rest_port, version)` waits until the version serves."""


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one way of control.

    `served`: seconds from each renaming until the version serves. `before`, `during` and `after` the loads: the
    other model's latencies in seconds.
    """

    control: str
    served: list[float]
    before: list[float]
    during: list[float]
    after: list[float]


@dataclass(frozen=True, slots=True)
class Started:
    """Results of a gRPC transport for each start: seconds until the server is ready, resident bytes at rest."""

    transport: str
    seconds: list[float]
    resident: list[int]


def start(transport: str, times: int, core: int | None) -> Started:
    """Start the server `times` times, with 18 small models."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"
        shutil.copytree(MODELS, models, ignore=shutil.ignore_patterns("__pycache__"))
        both = [_start_once(models, transport, core) for _ in range(times)]
    return Started(transport, [seconds for seconds, _ in both], [resident for _, resident in both])


def _start_once(models: Path, transport: str, core: int | None) -> tuple[float, int]:
    grpc_port, rest_port = servers.free_port(), servers.free_port()
    command = [sys.executable, "-m", "triglot", "serve", str(models), "--grpc-transport", transport]
    command += ["--grpc-port", str(grpc_port), "--rest-port", str(rest_port), "--drain-delay", "0"]
    began = time.perf_counter()
    seconds = 0.0

    def ready() -> bool:
        nonlocal seconds
        limit = began + START_LIMIT
        while not servers.answers_ready(rest_port) and time.perf_counter() < limit:
            time.sleep(0.002)  # No event signals that another process is ready.
        seconds = time.perf_counter() - began
        return True

    log = models.parent / "log"
    with servers.started("triglot", command, ready, core=core, log=log, environment={}) as server:
        if seconds >= START_LIMIT:
            raise BenchError(f"the server was not ready within {START_LIMIT:.0f} s:\n{server.tail()}")
        time.sleep(REST_SECONDS)  # Memory used only during the start is freed by then.
        return seconds, server.resident_bytes() or 0


def start_line(started: Started) -> str:
    """Return the line to print."""
    seconds, megabytes = np.median(started.seconds), np.median(started.resident) / 2**20
    return (
        f"start over {started.transport:>3}: ready after {seconds:.2f} s (longest {max(started.seconds):.2f} s), "
        f"{megabytes:.0f} MiB at rest"
    )


def _ask(port: int, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LOAD_LIMIT)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


async def _polled(port: int, version: int) -> None:
    path = f"/v2/models/{CHANGING}/versions/{version}/ready"
    limit = time.monotonic() + LOAD_LIMIT
    while (await asyncio.to_thread(_ask, port, "GET", path))[0] != 200:
        if time.monotonic() > limit:
            raise BenchError(f"version {version} did not serve within {LOAD_LIMIT:.0f} s")
        await asyncio.sleep(LOOK_SECONDS)  # No event signals that polling has loaded it.


async def _loaded(port: int, version: int) -> None:
    status, body = await asyncio.to_thread(_ask, port, "POST", f"/v2/repository/models/{CHANGING}/load")
    if status != 200:
        raise BenchError(f"load of version {version} answered {status}: {body.decode(errors='replace')}")


CONTROLS = (
    Control("poll, looking every 0.5 s", ("--watch", "--poll-interval", "0.5"), _polled),
    Control("explicit", ("--model-control-mode", "explicit", "--load-model", "*"), _loaded),
)


class Repository:
    """The model repository with two models; versions of the changing one are written elsewhere, then renamed."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.root = folder / "models"
        self._versions_to_come = folder / "beside"
        self._weights = folder / "weights.npy"
        np.save(self._weights, np.ones((megabytes * 2**20 // 64, 16), np.float32))
        shutil.copytree(MODELS / STEADY, self.root / STEADY)
        (self.root / CHANGING).mkdir()
        (self.root / CHANGING / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }\n")
        self.put(self.make(1), 1)

    def make(self, version: int) -> Path:
        """Write a complete version outside of the repository; returns its folder."""
        folder = self._versions_to_come / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(MODEL)
        (folder / "weights.npy").hardlink_to(self._weights)  # Writing it each time would be measured.
        return folder

    def put(self, made: Path, version: int) -> None:
        """Rename a version into the repository, and remove the one before the last."""
        made.rename(self.root / CHANGING / str(version))
        shutil.rmtree(self.root / CHANGING / str(version - 2), ignore_errors=True)


async def _latencies(port: int, seconds: float, work: Callable[[], Awaitable[None]] | None = None) -> list[float]:
    """Call the steady model, one call at a time, for `seconds` or until `work` is done; returns the latencies."""
    exchange = grpc_exchange(STEADY, tensor(1, 16))
    latencies: list[float] = []
    connections = await h2client.connect(port, exchange.path, [Request(exchange.body)], 1)
    try:
        working = None if work is None else asyncio.ensure_future(work())
        limit = time.monotonic() + seconds
        while (time.monotonic() < limit) if working is None else not working.done():
            latencies += (await drive(connections, SLICE_SECONDS, framed([exchange.reply]))).latencies
        if working is not None:
            await working
    finally:
        await close(*connections)
    return latencies


async def _measure(control: Control, repository: Repository, ports: tuple[int, int], loads: int) -> Result:
    grpc_port, rest_port = ports
    served: list[float] = []

    async def change() -> None:
        for version in range(2, loads + 2):
            made = await asyncio.to_thread(repository.make, version)
            started = time.perf_counter()
            repository.put(made, version)
            await control.serve(rest_port, version)
            served.append(time.perf_counter() - started)
            await asyncio.sleep(PAUSE_SECONDS)  # So that the effects of loads on latencies do not overlap.

    await _latencies(grpc_port, 1.0)  # warm-up, not counted
    before = await _latencies(grpc_port, 4.0)
    during = await _latencies(grpc_port, 0.0, change)
    after = await _latencies(grpc_port, 4.0)
    return Result(control.name, served, before, during, after)


def measure(control: Control, megabytes: int, loads: int, core: int | None) -> Result:
    """Measure one way of control, on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as folder:
        repository = Repository(Path(folder), megabytes)
        with servers.serving(repository.root, core, control.flags) as (server, grpc_port, rest_port):
            try:
                return asyncio.run(_measure(control, repository, (grpc_port, rest_port), loads))
            except (BenchError, OSError) as error:
                raise BenchError(f"{control.name}: {error}\n{server.tail()}") from error


def lines(result: Result) -> Iterator[str]:
    """Yield the lines to print."""
    milliseconds = np.array(result.served) * 1e3
    median, worst = np.median(milliseconds), milliseconds.max()
    yield f"{result.control}: {len(result.served)} loads"
    yield f"  renamed into place → served: median {median:.0f} ms, longest {worst:.0f} ms"
    calm = float(np.percentile(result.before, 99))
    for name, latencies in (("before", result.before), ("during", result.during), ("after", result.after)):
        p50, p99 = np.percentile(latencies, (50, 99))
        yield (
            f"  the other model {name:>6}: p50 {p50 * 1e3:5.2f} ms, p99 {p99 * 1e3:5.2f} ms "
            f"({p99 / calm:.2f} of before), longest {max(latencies) * 1e3:.0f} ms, {len(latencies)} calls"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.lifecycle", description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=int, default=20, help="versions to load (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=STARTS, help="of the server (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=64, help="weights of a version (default: %(default)s)")
    arguments = parser.parse_args(words)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    what = f"versions of {arguments.megabytes} MiB; calls of another model, 1×16, one at a time; {cores.note}"
    print(*report.machine(), what, sep="\n", flush=True)
    try:
        print("")
        for transport in GRPC_TRANSPORTS if arguments.starts else ():
            print(start_line(start(transport, arguments.starts, cores.server)), flush=True)
        for control in CONTROLS if arguments.loads else ():
            print(
                "",
                *lines(measure(control, arguments.megabytes, arguments.loads, cores.server)),
                sep="\n",
                flush=True,
            )
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
