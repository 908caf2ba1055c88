"""Measures the effect of storms by stock clients on concurrent calls: many calls that end, or reconnect, at once.

From the repository's root: `python -m bench.storms --help`. gRPC's own client calls a model that never responds;
all these calls reach their deadline together, are cancelled together, or lose their channels together, which are
then replaced. Meanwhile other calls are made, one after the other and on a stream: on the same channels, or, for
reconnects, on one of their own. Only the calls of the storm may fail.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench import report, servers
from bench.payloads import grpc_exchange, tensor
from bench.tally import BenchError

SLOW, QUICK = "slow", "quick"
MODEL = """
import asyncio
import triglot

class Model(triglot.Model):
    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)

    async def infer(self, inputs):
        {wait}
        return {{"y": inputs["x"]}}
"""
SERVICE = "/inference.GRPCInferenceService/"
TRANSPORTS = ("h2", "aio")
ENDS = {
    "deadlines": grpc.StatusCode.DEADLINE_EXCEEDED,
    "cancels": grpc.StatusCode.CANCELLED,
    "reconnects": grpc.StatusCode.CANCELLED,
}
LIMIT = 60.0
"""Deadline in seconds of calls beside a storm."""
DEADLINE = 2.0
CALLS_PER_CLIENT = 5
"""Calls of each client that reconnects."""
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
COLUMNS = (
    "transport",
    "storm",
    "calls",
    "channels",
    "seconds",
    "connections lost",
    "beside it: calls",
    "failed",
    "longest ms",
    "ended otherwise",
    "CANCELLED by nobody",
)


@dataclass(frozen=True, slots=True)
class Storm:
    """A storm: one line of the table."""

    transport: str
    how: str
    calls: int
    channels: int


@dataclass(slots=True)
class Result:
    """Results of a storm."""

    seconds: float = 0.0
    lost: int = 0
    """Number of connections that ended while their channel was open."""
    latencies: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """Failed calls beside the storm, by their outcome."""
    otherwise: Counter[grpc.StatusCode] = field(default_factory=Counter)
    """Calls of the storm that ended with another code than expected."""

    @property
    def good(self) -> bool:
        """Whether nothing beside the storm failed, and its calls ended as expected."""
        return not (self.lost or self.failed or self.otherwise) and bool(self.latencies)


class HealthyCalls:
    """Makes calls one after the other, and calls on a stream, on one channel during its `async with` block."""

    def __init__(self, channel: grpc.aio.Channel, result: Result) -> None:
        exchange = grpc_exchange(QUICK, tensor(1, 16))
        self._body, self._expected = exchange.body, exchange.reply
        self._channel, self._result = channel, result
        self._call: Any = channel.unary_unary(exchange.path)
        self._stream: Any = channel.stream_stream(f"{SERVICE}ModelStreamInfer")(wait_for_ready=True)
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "HealthyCalls":
        await self._call(self._body, timeout=LIMIT, wait_for_ready=True)
        makers = (self._calls, self._streamed, self._watch)
        self._tasks = [asyncio.ensure_future(make()) for make in makers]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        calls, streamed, watch = self._tasks
        await asyncio.gather(calls, streamed)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        self._stream.cancel()

    async def _calls(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()  # One more call is made after the storm.
            began = time.perf_counter()
            try:
                if await self._call(self._body, timeout=LIMIT) != self._expected:
                    self._result.failed["another answer"] += 1
            except grpc.aio.AioRpcError as error:
                self._result.failed[error.code().name] += 1
            self._result.latencies.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)  # Leaves time for the client's other calls.

    async def _streamed(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()
            try:
                async with asyncio.timeout(LIMIT):
                    await self._stream.write(self._body)
                    if await self._stream.read() is grpc.aio.EOF:
                        raise asyncio.InvalidStateError
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self._result.failed[f"stream: {(await self._stream.code()).name}"] += 1
                return
            except TimeoutError:
                self._result.failed["stream: no answer"] += 1
                return
            await asyncio.sleep(0.05)  # As above.

    async def _watch(self) -> None:
        while True:
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            self._result.lost += 1
            while self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                await self._channel.wait_for_state_change(self._channel.get_state())


@asynccontextmanager
async def _channels(port: int, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    async with AsyncExitStack() as ends:
        made = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) for _ in range(count)]
        yield [await ends.enter_async_context(channel) for channel in made]


def _begin(channels: Sequence[grpc.aio.Channel], count: int, seconds: float | None) -> list[Any]:
    exchange = grpc_exchange(SLOW, tensor(1, 16))
    callables: list[Any] = [channel.unary_unary(exchange.path) for channel in channels]
    until = time.monotonic() + (seconds or 0.0)
    return [
        call(exchange.body, timeout=None if seconds is None else until - time.monotonic(), wait_for_ready=True)
        for call in itertools.islice(itertools.cycle(callables), count)
    ]


async def _wait_for_ends(calls: Sequence[Any], expected: grpc.StatusCode, result: Result) -> None:
    try:
        async with asyncio.timeout(LIMIT):
            result.otherwise.update(Counter([await call.code() for call in calls]))
    except TimeoutError:
        raise BenchError(f"calls that were to end with {expected.name} have not after {LIMIT:.0f} s") from None
    del result.otherwise[expected]


async def _end_together(storm: Storm, port: int, result: Result) -> None:
    async with _channels(port, storm.channels) as channels, AsyncExitStack() as healthy_calls:
        for channel in channels[:: max(1, len(channels) // 10)]:
            await healthy_calls.enter_async_context(HealthyCalls(channel, result))
        if storm.how == "deadlines":
            calls = _begin(channels, storm.calls, DEADLINE)
        else:
            calls = _begin(channels, storm.calls, None)
            await asyncio.sleep(DEADLINE)  # Until they have begun.
            for call in calls:
                call.cancel()
        await _wait_for_ends(calls, ENDS[storm.how], result)


async def _reconnect(storm: Storm, port: int, result: Result) -> None:
    async with _channels(port, 1) as (channel,), HealthyCalls(channel, result):
        for _ in range(2):
            async with _channels(port, storm.channels) as channels:
                quick = grpc_exchange(QUICK, tensor(1, 16))
                firsts: list[Any] = [
                    channel.unary_unary(quick.path)(quick.body, timeout=LIMIT, wait_for_ready=True)
                    for channel in channels
                ]
                for code in Counter([await first.code() for first in firsts]) - Counter(
                    {grpc.StatusCode.OK: 10**9}
                ):
                    result.failed[f"first call: {code.name}"] += 1
                calls = _begin(channels, storm.calls, None)
                await asyncio.sleep(DEADLINE / 4)  # Until they have begun.
            await _wait_for_ends(calls, ENDS[storm.how], result)


async def run(storm: Storm, port: int) -> Result:
    """Run one storm."""
    result, began = Result(), time.perf_counter()
    await (_reconnect if storm.how == "reconnects" else _end_together)(storm, port, result)
    result.seconds = time.perf_counter() - began
    return result


def storms(transport: str, counts: Sequence[int], channels: int) -> Iterator[Storm]:
    """Yield the storms for a transport."""
    for count in counts:
        for how in ("deadlines", "cancels"):
            yield Storm(transport, how, count, 1)
            yield Storm(transport, how, count, channels)
        yield Storm(transport, "reconnects", count, max(1, count // CALLS_PER_CLIENT))


def line(storm: Storm, result: Result) -> list[str]:
    """Return a line of the table."""
    cancelled = sum(number for how, number in result.failed.items() if "CANCELLED" in how)
    if storm.how == "deadlines":
        cancelled += result.otherwise[grpc.StatusCode.CANCELLED]
    return [
        storm.transport,
        storm.how,
        f"{storm.calls:,}",
        f"{storm.channels:,}",
        f"{result.seconds:.1f}",
        str(result.lost),
        f"{len(result.latencies):,}",
        ", ".join(f"{number} {how}" for how, number in result.failed.items()) or "0",
        f"{max(result.latencies, default=0.0) * 1e3:.0f}",
        ", ".join(f"{number} {code.name}" for code, number in result.otherwise.items()) or "0",
        str(cancelled),
    ]


def measure(transport: str, counts: Sequence[int], channels: int) -> list[tuple[Storm, Result]]:
    """Start a server with this transport, and run every storm."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"
        for model, wait in ((SLOW, "await asyncio.sleep(3600)"), (QUICK, "")):
            (models / model / "1").mkdir(parents=True)
            (models / model / "1" / "model.py").write_text(MODEL.format(wait=wait))
        flags = ("--grpc-transport", transport, "--max-queue-size", str(2 * max(counts)))
        with servers.serving(models, None, flags) as (_, port, _rest):
            return [(storm, asyncio.run(run(storm, port))) for storm in storms(transport, counts, channels)]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if a storm did any harm, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.storms", description=__doc__.splitlines()[0])
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="(default: both)")
    parser.add_argument("--calls", nargs="+", type=int, default=[200, 1000, 5000], help="that end at once")
    parser.add_argument("--channels", type=int, default=20, help="where there are many (default: %(default)s)")
    given = parser.parse_args(words)
    print(*report.machine(), "a model that never answers; no connection, no other call may be lost", "", sep="\n")
    try:
        results = [
            pair for transport in given.transport for pair in measure(transport, given.calls, given.channels)
        ]
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(report.plain(COLUMNS, [line(*pair) for pair in results]))
    harmed = sum(not result.good for _, result in results)
    print(f"\n{len(results)} storms, {harmed} harmed something")
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
