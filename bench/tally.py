"""What the load clients share: the counting of a run, how it is driven, and the error that ends the bench."""

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.headers import NO_METADATA, Metadata

CLOSE_LIMIT = 10.0


class BenchError(Exception):
    """The bench cannot go on; the text is for the person who started it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a client sends it, and what its reply must hold."""

    body: bytes
    """A gRPC message, or a whole HTTP/1.1 request."""
    holds: tuple[bytes, ...] = ()
    """Without any the reply must have the expected one's size, and the first one its bytes."""
    metadata: Metadata = NO_METADATA
    timeout: int | None = None
    """Milliseconds, over gRPC."""

    def missing(self, reply: bytes | bytearray) -> str:
        """What is wrong with a reply that must hold something; "" when it is right."""
        for part in self.holds:
            if part not in reply:
                return f"the reply does not hold its request's {part[:100]!r}: {bytes(reply[:300])!r}"
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run under load."""

    calls: int
    seconds: float  # from the first request to the last reply
    latencies: list[float]  # seconds
    first_bytes: list[float]  # seconds to the first bytes of a reply, as far as the client looks at them


class Tally:
    """Counts one run, for all its connections together."""

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
        """One of the places for a call in flight stays empty from here on."""
        self.open_slots -= 1
        if not self.open_slots and not self.done.done():
            self.done.set_result(None)

    def wrong(self, text: str) -> None:
        """A reply was not the expected one: no further calls, the open ones may end."""
        self.errors += 1
        self.first_error = self.first_error or text
        self.deadline = 0.0
        self.close_slot()

    def abort(self, text: str) -> None:
        """The connection is of no more use: the run ends now."""
        self.errors += 1
        self.first_error = self.first_error or text
        if not self.done.done():
            self.done.set_result(None)


class LoadConnection(Protocol):
    """A connection that keeps its calls in flight from `begin` until the tally's deadline."""

    lost: asyncio.Future[None]
    """Done when its socket is closed."""

    def begin(self, tally: Tally) -> None: ...

    def close(self) -> None: ...


async def close(*connections: LoadConnection) -> None:
    """Close them without noise, and wait for their sockets to be closed."""
    for connection in connections:
        connection.close()
    async with asyncio.timeout(CLOSE_LIMIT):
        for connection in connections:
            await connection.lost


async def drive(
    connections: Sequence[LoadConnection], seconds: float, expected: bytes, patience: float = 60.0
) -> Outcome:
    """Load the server for so many seconds; raise BenchError if a single reply was not as expected.

    Calls that are open at the end are waited for (at most `patience` seconds), so every call that cost the
    server something is counted and the server is idle afterwards.
    """
    gc.collect()
    gc.disable()  # a collection of the client's would be measured as the server's latency
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
        ended = time.perf_counter()
    finally:
        gc.enable()
    if tally.errors:
        raise BenchError(
            f"{tally.errors} wrong replies after {len(tally.latencies)} good ones; first: {tally.first_error}"
        )
    return Outcome(len(tally.latencies), ended - started, tally.latencies, tally.first_bytes)
