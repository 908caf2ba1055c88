"""Shared by the load clients: drives and counts a run; and the error that ends a bench."""

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.headers import NO_METADATA, Metadata

CLOSE_LIMIT = 10.0


class BenchError(Exception):
    """Ends the bench; its text is printed for the user."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a client sends it, and the parts that its reply must contain."""

    body: bytes
    """A gRPC message, or a complete HTTP/1.1 request."""
    holds: tuple[bytes, ...] = ()
    """Parts of the reply. If empty, replies must have the expected one's size, and the first one must be equal."""
    metadata: Metadata = NO_METADATA
    timeout: int | None = None
    """Deadline in milliseconds, over gRPC; None for no deadline."""

    def missing(self, reply: bytes | bytearray) -> str:
        """Return what is wrong with a reply by `holds`; "" if nothing is."""
        for part in self.holds:
            if part not in reply:
                return f"the reply does not hold its request's {part[:100]!r}: {bytes(reply[:300])!r}"
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one run under load."""

    calls: int
    seconds: float  # from the first request to the last reply
    latencies: list[float]  # seconds
    first_bytes: list[float]  # seconds to the first bytes of a reply, if the client measures them


class Tally:
    """Counts one run, for all its connections together. On the event loop."""

    __slots__ = ("deadline", "done", "errors", "expected", "first_bytes", "first_error", "latencies", "open_slots")

    def __init__(self, expected: bytes, deadline: float) -> None:
        self.expected = expected
        self.deadline = deadline  # no call starts after it; the open ones are waited for
        self.latencies: list[float] = []
        self.first_bytes: list[float] = []
        self.open_slots = 0
        self.errors = 0
        self.first_error = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close_slot(self) -> None:
        """Close one of the places for a call in flight; the run is done when none is left."""
        self.open_slots -= 1
        if not self.open_slots and not self.done.done():
            self.done.set_result(None)

    def wrong(self, text: str) -> None:
        """Record an unexpected reply: no further calls start, the open ones may end."""
        self.errors += 1
        self.first_error = self.first_error or text
        self.deadline = 0.0
        self.close_slot()

    def abort(self, text: str) -> None:
        """Record the failure of a connection: the run ends now."""
        self.errors += 1
        self.first_error = self.first_error or text
        if not self.done.done():
            self.done.set_result(None)


class LoadConnection(Protocol):
    """A connection that keeps its calls in flight from `begin` until the tally's deadline."""

    lost: asyncio.Future[None]
    """Done when the connection's socket is closed."""

    def begin(self, tally: Tally) -> None: ...

    def close(self) -> None: ...


async def close(*connections: LoadConnection) -> None:
    """Close the connections, and wait for their sockets to be closed."""
    for connection in connections:
        connection.close()
    async with asyncio.timeout(CLOSE_LIMIT):
        for connection in connections:
            await connection.lost


async def drive(
    connections: Sequence[LoadConnection], seconds: float, expected: bytes, patience: float = 60.0
) -> Outcome:
    """Load the server for `seconds`; returns the results. Raise BenchError if any reply was not as expected.

    It waits for calls that are open at the end (at most `patience` seconds), so every call that cost the server
    something is counted, and the server is idle afterwards.
    """
    gc.collect()
    gc.disable()  # a collection in the client would be measured as the server's latency
    try:
        started = time.perf_counter()
        tally = Tally(expected, started + seconds)
        for connection in connections:
            connection.begin(tally)
        try:
            async with asyncio.timeout(seconds + patience):
                await tally.done
        except TimeoutError:
            raise BenchError(f"{tally.open_slots} calls without a reply for {patience:.0f} s") from None
        finished_at = time.perf_counter()
    finally:
        gc.enable()
    if tally.errors:
        raise BenchError(
            f"{tally.errors} wrong replies after {len(tally.latencies)} good ones; first: {tally.first_error}"
        )
    return Outcome(len(tally.latencies), finished_at - started, tally.latencies, tally.first_bytes)
