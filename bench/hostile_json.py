"""Measures what hostile JSON costs: memory, and the latency of concurrent calls.

From the repository's root: `python -m bench.hostile_json --help`. Every JSON route that reads large bodies is sent
every kind of body, 16 at once, compressed if the route accepts that. Meanwhile, one client calls a small inference
again and again. The server runs in a cgroup of 2 GiB if this user may create one.
"""

import argparse
import asyncio
import contextlib
import gzip
import http.client
import io
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import aiohttp
import numpy as np

from bench import report, servers
from bench.other_results import WRONG
from bench.tally import BenchError
from triglot.protocols.json.dialect import DEFAULT_LIMITS

AT_ONCE = 16
SIZE = 60 * 2**20
CGROUPS = Path("/sys/fs/cgroup/memory")
CGROUP_BYTES = 2 * 2**30
MOST_GROWN = 4 * DEFAULT_LIMITS.size
"""Most bytes by which the resident size may grow, besides the size of the bodies as sent."""
MOST_P99 = 0.05
MODELS = {
    "numbers/model.py": """
import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"][:1]}
""",
    "texts/model.py": """
import numpy as np
import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("y", "INT64", [1])]

    def infer(self, inputs):
        return {"y": np.array([inputs["x"].size])}
""",
    "examples/model.py": """
import numpy as np
import triglot


class Model(triglot.Model):
    signatures = {
        "serving_default": triglot.Signature(
            inputs=[triglot.TensorSpec("inputs", "BYTES", [-1])],
            outputs=[triglot.TensorSpec("outputs", "FP32", [-1])],
            method="regress",
        )
    }

    def infer(self, inputs):
        return {"outputs": np.zeros(inputs["inputs"].shape, np.float32)}
""",
    "custom/routine.py": """
class Predictor:
    @classmethod
    def from_path(cls, model_dir):
        return cls()

    def predict(self, instances, **kwargs):
        return [len(instances)]
""",
    "custom/predictor.toml": 'prediction_class = "routine.Predictor"\n',
}


@dataclass(frozen=True, slots=True)
class Route:
    """A route. `head` and `tail` of a body enclose the hostile part. `compressed`: whether it accepts gzip.

    `first`: the first of the routes with the same codec; only it is sent uncompressed bodies, and slow ones.
    """

    path: str
    head: bytes
    tail: bytes
    compressed: bool = True
    first: bool = False


KSERVE = b'{"inputs":[{"name":"x","datatype":"%b","shape":[%d],"data":['
ROUTES = (
    Route("/v2/models/numbers/infer", KSERVE % (b"FP32", 3), b"]}]}", first=True),
    Route("/v2/models/texts/infer", KSERVE % (b"BYTES", 3), b"]}]}", first=True),
    Route("/v2/models/texts/generate", b'{"x":[', b"]}", compressed=False, first=True),
    Route("/v1/models/numbers:predict", b'{"instances":[', b"]}", first=True),
    Route("/v1/models/texts:predict", b'{"inputs":[', b"]}", first=True),
    Route("/v1/models/examples:regress", b'{"examples":[', b"]}"),
    Route("/v1/projects/p/models/custom:predict", b'{"instances":[', b"]}"),
    Route("/v1/projects/p/models/numbers:predict", b'{"instances":[', b"]}"),
    Route("/grps/v1/infer/predict?model=numbers-1", b'{"ndarray":[', b"]}", first=True),
    Route("/grps/v1/infer/predict?model=texts-1", b'{"gmap":{"s_s":{"k":[', b"]}}}"),
)
KINDS = {
    "empty texts": b'"",',
    "empty lists": b"[],",
    "empty objects": b"{},",
    "small numbers": b"1,",
    "short lists": b"[1,2],",
    "NaN": b"NaN,",
    "many keys": b'{"a":1,"b":[2],"c":"x"},',
    "long numbers": b"1" * 400_000 + b",",
    "long texts": b'"' + b"\\u00e9x," * 100_000 + b'",',
    "deep": b"[" * SIZE,
    "one number": b"7" * SIZE,
    "one text": b'"' + b"z" * SIZE + b'",',
    "blanks": b" " * SIZE,
}
TAKES_LONG = ("long texts",)
PLAIN = "empty texts,small numbers,deep,one number,one text,blanks"


@dataclass(slots=True)
class Result:
    """Results for one kind of body: the routes' responses, latencies of concurrent calls, the server's size."""

    statuses: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    peak: int = 0

    def p99(self) -> float:
        return float(np.quantile(self.waits, 0.99)) if self.waits else float("inf")


def body_of(route: Route, item: bytes) -> bytes:
    """Return a body of about `SIZE` bytes that repeats `item`, valid JSON if the item is."""
    count = max(1, SIZE // len(item))
    return route.head + (item * count).rstrip(b",") + route.tail


@contextlib.contextmanager
def cgroup() -> Iterator[tuple[str, contextlib.AbstractContextManager[None]]]:
    """Create a cgroup with a memory limit, if possible.

    Yield a description of the limit, and a context manager: processes started in its block run in the cgroup.
    """
    folder = CGROUPS / f"triglot-bench-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(CGROUP_BYTES))
    except OSError as error:
        yield f"no cgroup: {error}", contextlib.nullcontext()
        return
    try:
        yield f"in a cgroup of {CGROUP_BYTES >> 20} MiB", _inside(folder)
    finally:
        folder.rmdir()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Move this process into the cgroup during the block; children that it starts stay there."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (CGROUPS / "cgroup.procs").write_text(str(os.getpid()))


def probe(port: int, stop: Event, waits: Connection) -> None:
    """Call a small inference until `stop` is set; then send the latencies. Runs in a process of its own."""
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    taken = []
    while not stop.wait(0.002):
        start = time.perf_counter()
        connection.request("POST", "/v2/models/numbers/infer", body)
        response = connection.getresponse()
        response.read()
        taken.append(time.perf_counter() - start if response.status == 200 else math.inf)
    waits.send(taken)


@contextlib.contextmanager
def probing(port: int, result: Result) -> Iterator[None]:
    """Run `probe` during the block; adds the latencies to `result`."""
    context = get_context("spawn")
    stop = context.Event()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=probe, args=(port, stop, sender), daemon=True)
    process.start()
    try:
        yield
    finally:
        stop.set()
    if not receiver.poll(60):
        raise BenchError("another call was not answered within 60 s")
    result.waits += receiver.recv()
    process.join()


def _prepare(route: Route, item: bytes, compressed: bool) -> tuple[bytes, dict[str, str]]:
    body, headers = body_of(route, item), {"Content-Type": "application/json"}
    if compressed:
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return body, headers


async def _attack(url: str, body: bytes, headers: dict[str, str], result: Result, timeout: float) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        async with session.post(url, data=io.BytesIO(body), headers=headers) as response:
            await response.read()
            result.statuses[response.status] = result.statuses.get(response.status, 0) + 1

    limit = aiohttp.ClientTimeout(timeout)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
        start = time.perf_counter()
        await asyncio.gather(*[send(session) for _ in range(AT_ONCE)])
        result.seconds += time.perf_counter() - start


def measure(
    kind: str, routes: Sequence[Route], compressed: bool, models: Path, cores: servers.Cores, timeout: float
) -> bool:
    """Send one kind of body to all routes of a server, one after the other; returns whether it kept all bounds."""
    result = Result()
    with contextlib.ExitStack() as stack:
        how, inside = stack.enter_context(cgroup())
        with inside:
            flags = ["--log-level", "error"]
            server, _, port = stack.enter_context(servers.serving(models, cores.server, flags))
        before = server.resident_bytes() or 0
        servers.pin(cores.client)
        for route in routes:
            body, headers = _prepare(route, KINDS[kind], compressed)
            try:
                with probing(port, result):
                    asyncio.run(_attack(f"http://127.0.0.1:{port}{route.path}", body, headers, result, timeout))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise BenchError(f"{kind}, {route.path}: {error!r}") from error
        grown = (server.peak_bytes() or 0) - before
        alive = server.alive()
    good = alive and grown <= MOST_GROWN and result.p99() <= MOST_P99
    print(
        f"  {kind:>14}, {'gzip' if compressed else 'plain'}: {dict(sorted(result.statuses.items()))} in "
        f"{result.seconds:.1f} s; {len(result.waits)} other calls: p99 {result.p99() * 1e3:.1f} ms, longest "
        f"{max(result.waits) * 1e3:.1f} ms; +{grown >> 20} MiB at most, {how}, "
        f"{'as it should be' if good else WRONG}",
        flush=True,
    )
    return good


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if a bound was exceeded, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile_json", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="sent compressed, with commas (default: all)")
    parser.add_argument("--plain", default=PLAIN, help="kinds sent as they are (default: %(default)s)")
    parser.add_argument("--routes", default="", help="only those with this in their path")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take (%(default)s)")
    arguments = parser.parse_args(words)
    cores = servers.choose_cores()
    print(*report.machine(), cores.note, sep="\n", flush=True)
    chosen = [route for route in ROUTES if arguments.routes in route.path]
    right = True
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"
        for file, code in MODELS.items():
            (models / file).parent.mkdir(parents=True, exist_ok=True)
            (models / file).write_text(code)
        for compressed, kinds in ((True, arguments.kinds), (False, arguments.plain)):
            for kind in kinds.split(",") if kinds else ():
                few = kind in TAKES_LONG or not compressed
                routes = [
                    route for route in chosen if (route.compressed or not compressed) and (route.first or not few)
                ]
                right &= not routes or measure(kind, routes, compressed, models, cores, arguments.timeout)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
