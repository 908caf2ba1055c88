"""Measures whether the server's memory grows with its calls, of any shape and over either gRPC transport.

From the repository's root: `python -m bench.leaks --help`. Each shape of call has a server of its own, which is
called again and again; its resident size is read after each slice of calls, and a line is fitted through all but
the first ones. As a control, a model that keeps 4 KB of each call must be detected.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import grpc
import grpc.aio
import numpy as np

from bench import report, servers
from bench.other_results import WRONG
from bench.payloads import GRPC_PATH, STREAM_PATH, infer_request, tensor
from bench.tally import BenchError
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb

CALLS = 20_000
IN_FLIGHT = 32
SLICES, UNCOUNTED = 16, 6
LIMIT, SEEN = 1024.0, 3 * 1024.0
"""Bytes per call: growth must be less than `LIMIT` for each shape, and more than `SEEN` for the control."""
MEANT = 0.9
"""Least share of a shape's calls that must end as intended: some end before they are cancelled or expire."""
KEPT = 4096
LOAD_PATH = "/inference.GRPCInferenceService/RepositoryModelLoad"
TRANSPORTS = ("h2", "aio")

HEAD = """
import asyncio, time
import triglot

KEPT = []


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
"""
MODELS = {
    "answers": """
    def infer(self, inputs):
        return {"y": inputs["x"]}
""",
    "refuses": """
    def infer(self, inputs):
        raise triglot.InvalidArgument("never")
""",
    "fails": """
    def infer(self, inputs):
        raise ValueError("of its own")
""",
    "waits_on_loop": """
    async def infer(self, inputs):
        await asyncio.Event().wait()  # Until its caller leaves.
""",
    "waits_on_thread": """
    instances = 16

    def infer(self, inputs, call):
        while not call.cancelled:
            time.sleep(0.0005)  # A call has nothing that a thread could wait for.
        time.sleep(0.005)  # The answer comes when the call is over for everybody else.
        return {"y": inputs["x"]}
""",
    "endless": """
    instances = 16

    def infer(self, inputs):
        while True:
            yield {"y": inputs["x"]}
""",
    "keeps": f"""
    def infer(self, inputs):
        KEPT.append(bytearray({KEPT}))
        return {{"y": inputs["x"]}}
""",
}


class Client:
    """Makes the calls of all shapes, on one connection."""

    def __init__(self, channel: grpc.aio.Channel, models: Path) -> None:
        self._models = models
        self._loaded = 0
        self.meant = 0
        """Number of calls that ended as their shape intends."""
        self._infer = channel.unary_unary(GRPC_PATH)
        self._stream = channel.stream_stream(STREAM_PATH)
        self._load = channel.unary_unary(LOAD_PATH)
        self._bodies = {name: infer_request(name, tensor(1, 16)).SerializeToString() for name in (*MODELS, "none")}

    async def _ends(self, model: str, *codes: Code, timeout: float | None = None) -> None:
        code, details = Code.OK, ""
        try:
            await self._infer(self._bodies[model], timeout=timeout)
        except grpc.aio.AioRpcError as error:
            code, details = Code(error.code().value[0]), error.details() or ""
        if code not in codes:
            raise BenchError(f"{model}: expected {codes[0].name}, got {code.name}: {details}")
        self.meant += code is codes[0]

    async def ok(self, number: int) -> None:
        await self._ends("answers", Code.OK)

    async def keeps(self, number: int) -> None:
        await self._ends("keeps", Code.OK)

    async def error(self, number: int) -> None:
        kinds = (("refuses", Code.INVALID_ARGUMENT), ("fails", Code.INTERNAL), ("none", Code.NOT_FOUND))
        await self._ends(*kinds[number % 3])

    async def deadline(self, number: int) -> None:
        model = ("waits_on_loop", "waits_on_thread")[number % 2]
        # Client and server race at the deadline; and the server closes a connection with too many resets.
        ends = Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.OK, Code.UNAVAILABLE
        await self._ends(model, *ends, timeout=0.003)

    async def cancel(self, number: int) -> None:
        call = self._infer(self._bodies[("waits_on_loop", "waits_on_thread")[number % 2]])
        await asyncio.sleep(0.003)  # The call may be at any stage by then, on purpose.
        self.meant += call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call

    async def cut(self, number: int) -> None:
        call = self._stream(iter([self._bodies["endless"]]))
        try:
            for _ in range(number % 3):
                await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:  # As above.
                raise
        self.meant += call.cancel()

    async def reload(self, number: int) -> None:
        self._loaded += 1
        code = f"{HEAD}{MODELS['answers']}\nLOADED = {self._loaded}\n"
        (self._models / "answers" / "model.py").write_text(code)  # Without a change, nothing would be loaded.
        await self._load(pb.RepositoryModelLoadRequest(model_name="answers").SerializeToString())
        await self.ok(number)


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape: a way in which calls end."""

    name: str
    call: Callable[[Client, int], Awaitable[None]]
    in_flight: int = IN_FLIGHT


SHAPES = (
    Shape("ok", Client.ok),
    Shape("error", Client.error),
    Shape("cancel", Client.cancel),
    Shape("deadline", Client.deadline),
    Shape("stream cut", Client.cut),
    Shape("reload", Client.reload, in_flight=1),
    Shape("kept 4 KB", Client.keeps),
)
CONTROL = SHAPES[-1]


@dataclass(frozen=True, slots=True)
class Growth:
    """Results of one shape: the server's resident bytes after each slice of `slice_calls` calls; `meant` is the
    number of all calls that ended as intended."""

    shape: Shape
    slice_calls: int
    resident: Sequence[int]
    meant: int

    @property
    def slope(self) -> float:
        """Growth of memory in bytes per call."""
        sampled = np.array(self.resident[UNCOUNTED:], np.float64)
        calls = np.arange(len(sampled)) * self.slice_calls
        return float(np.polyfit(calls, sampled, 1)[0])

    @property
    def right(self) -> bool:
        """Whether calls ended as intended, and memory did not grow, or for the control did."""
        if self.meant < MEANT * self.slice_calls * SLICES:
            return False
        return self.slope > SEEN if self.shape == CONTROL else self.slope < LIMIT


async def _ask(port: int, models: Path, shape: Shape, calls: int, look: Callable[[], int]) -> Growth:
    sizes = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = Client(channel, models)
        for _ in range(SLICES):
            numbers = iter(range(calls))

            async def work(numbers: Iterator[int] = numbers) -> None:
                for number in numbers:
                    await shape.call(client, number)

            async with asyncio.TaskGroup() as group:
                for _ in range(shape.in_flight):
                    group.create_task(work())
            sizes.append(look())
    return Growth(shape, calls, sizes, client.meant)


def measure(shape: Shape, transport: str, calls: int) -> Growth:
    """Measure one shape on a server of its own. Raise `BenchError` for a call with an unexpected end."""
    each = max(1, calls // SLICES)
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"
        for model, code in MODELS.items():
            (models / model).mkdir(parents=True)
            (models / model / "model.py").write_text(HEAD + code)
        flags = ["--grpc-transport", transport, "--model-control-mode", "explicit", "--load-model", "*"]
        flags += ["--log-level", "error"]
        with servers.serving(models, None, flags) as (server, port, _):

            def look() -> int:
                resident = server.resident_bytes()
                if resident is None:
                    raise BenchError("this platform does not say how much memory another process has")
                return resident

            try:
                return asyncio.run(_ask(port, models, shape, each, look))
            except* (BenchError, grpc.aio.AioRpcError) as group:
                raise BenchError(
                    f"{shape.name} over {transport}: {group.exceptions[0]}\n{server.tail()}"
                ) from group


def line(growth: Growth) -> str:
    """Return the line to print."""
    calls = growth.slice_calls * SLICES
    meant = f"{calls} calls" if growth.meant == calls else f"{growth.meant} of {calls} calls"
    first, last = (growth.resident[at] / 2**20 for at in (0, -1))
    verdict = "as it should be" if growth.right else WRONG
    return (
        f"  {growth.shape.name:>10}: {growth.slope:7.0f} bytes a call, {meant}, "
        f"{first:.1f} → {last:.1f} MiB, {verdict}"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if memory grows with a shape, or the control is not detected, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.leaks", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=CALLS, help="of each shape (default: %(default)s)")
    parser.add_argument("--only", default="", help="shapes, with commas (default: all)")
    arguments = parser.parse_args(words)
    names = [name.strip() for name in arguments.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in [shape.name for shape in SHAPES]]:
        parser.error(f"unknown shape {unknown[0]!r}; there are {', '.join(shape.name for shape in SHAPES)}")
    what = f"less than {LIMIT:.0f} bytes a call wanted, more than {SEEN:.0f} of what keeps {KEPT}"
    print(*report.machine(), what, sep="\n", flush=True)
    chosen = [shape for shape in SHAPES if not names or shape.name in names]
    right = True
    # Two at a time, because no times are measured; in processes, because grpc.aio has one loop per process.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        growing = {
            transport: [pool.submit(measure, shape, transport, arguments.calls) for shape in chosen]
            for transport in TRANSPORTS
        }
        try:
            for transport, growths in growing.items():
                print("", transport, sep="\n")
                for growth in growths:
                    right &= growth.result().right
                    print(line(growth.result()), flush=True)
        except BenchError as error:
            pool.shutdown(cancel_futures=True)
            print(error, file=sys.stderr)
            return 1
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
