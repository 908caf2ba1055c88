"""An open-loop gRPC load client: calls start when they are due, whether or not earlier ones have ended."""

import asyncio
import time
from dataclasses import dataclass, field
from random import Random

from bench.h2client import H2Connection, framed_requests, headers_of
from bench.headers import NO_METADATA, HeaderBlocks, Metadata
from bench.tally import BenchError, Request


@dataclass(slots=True)
class Offered:
    """Latencies of the expected replies and of the errors, in seconds from the time when a call was due."""

    good: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds from the first call until the last reply."""
    latest: float = 0.0
    """Most seconds by which a call was sent late: the client's own share of a latency."""


class OpenConnection(H2Connection):
    """One connection. It detects errors because they have no data before their trailers; only the server's metrics
    have their codes."""

    def __init__(self, request: Request, headers: HeaderBlocks, reply: bytes) -> None:
        super().__init__(framed_requests([request]), 0, headers)
        self.offered = Offered()
        self.failure = ""
        self.over = asyncio.Event()
        """Set when no call is open, or the connection has failed."""
        self._reply_size = len(reply) + 5

    def send(self, due: float) -> None:
        """Start a call that was due at `due`."""
        self.over.clear()
        self._start().started = due
        self.offered.latest = max(self.offered.latest, time.perf_counter() - due)
        self._flush()

    def _finish(self, stream: int) -> None:
        call = self.calls.pop(stream, None)
        if call is None:
            return
        latency = time.perf_counter() - call.started
        if call.received == self._reply_size:
            self.offered.good.append(latency)
        elif not call.received:
            self.offered.refused.append(latency)
        else:
            self._abort(f"a reply of {call.received} bytes in place of {self._reply_size}")
        if not self.calls:
            self.over.set()

    def _abort(self, text: str) -> None:
        self.failure = self.failure or text
        self.over.set()
        super()._abort(text)


async def connect(
    port: int, path: str, message: bytes, reply: bytes, metadata: Metadata = NO_METADATA
) -> OpenConnection:
    """Open a connection to a local server; `reply` is the expected reply."""
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: OpenConnection(Request(message, metadata=metadata), headers_of(port, path), reply),
        "127.0.0.1",
        port,
    )
    async with asyncio.timeout(10):
        await connection.ready
    return connection


async def offer(connection: OpenConnection, rate: float, seconds: float, patience: float = 30.0) -> Offered:
    """Make `rate` calls per second, at random instants; waits at most `patience` seconds for the last replies.

    Raise `BenchError` when the connection fails, or calls get no reply.
    """
    random = Random(1)
    began = due = time.perf_counter()
    end = due + seconds
    while due < end and not connection.failure:
        while due <= min(time.perf_counter(), end):
            connection.send(due)
            due += random.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))  # The pace does not depend on replies.
    try:
        async with asyncio.timeout(patience):
            await connection.over.wait()
    except TimeoutError:
        raise BenchError(f"{len(connection.calls)} calls without an answer for {patience:.0f} s") from None
    if connection.failure:
        raise BenchError(connection.failure)
    connection.offered.seconds = time.perf_counter() - began
    return connection.offered
