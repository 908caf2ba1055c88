"""Clients without credentials that call repeatedly, each with a large body, in a process of their own.

`python -m bench.strangers PORT PATH` runs until its standard input ends, and prints the number of rejected calls.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from random import Random

from bench import servers
from bench.h2client import H2Connection, framed_requests, headers_of
from bench.headers import HeaderBlocks
from bench.tally import BenchError, Request, close

STRANGERS = 64
BODY_BYTES = 16 * 2**20
READY = "ready"
PAUSE = 0.05, 0.15
"""Least and greatest number of seconds from a rejection until the same client calls again: each is on its own."""
NICE = 19
SECONDS = 60
"""Most seconds for their start, and for their end."""
LEAST_CALLS = 2
"""Least number of calls of each client, so that each has called again after a rejection."""


class Stranger(H2Connection):
    """A client that sends a call's body until the call has ended, and calls again after a `PAUSE` of its own."""

    def __init__(self, number: int, headers: HeaderBlocks, body: bytes) -> None:
        super().__init__(framed_requests([Request(body)]), 1, headers)
        self.refused = 0
        self.failure = ""
        self.came_again = asyncio.Event()
        self._random = Random(number)

    def come(self) -> None:
        """Start a call."""
        if not self.transport.is_closing():
            self._start()
            self._flush()

    def _finish(self, stream: int) -> None:
        call = self.calls.pop(stream, None)
        if call is not None:
            self.sending.remove(call)
            self.refused += 1
            if self.refused == LEAST_CALLS:
                self.came_again.set()
            asyncio.get_running_loop().call_later(self._random.uniform(*PAUSE), self.come)

    def _abort(self, text: str) -> None:
        self.failure = self.failure or text
        self.came_again.set()
        super()._abort(text)


async def _come(port: int, path: str) -> str:
    """Run the clients; returns the text to print at the end."""
    loop = asyncio.get_running_loop()
    body = bytes(BODY_BYTES)
    strangers = []
    for number in range(STRANGERS):
        _, stranger = await loop.create_connection(
            partial(Stranger, number, headers_of(port, path), body), "127.0.0.1", port
        )
        await stranger.ready
        strangers.append(stranger)
    for stranger in strangers:
        stranger.come()
    print(READY, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    for stranger in strangers:
        await stranger.came_again.wait()
    failures = [stranger.failure for stranger in strangers if stranger.failure]
    await close(*strangers)
    if failures:
        return f"{len(failures)} lost their connections: {failures[0]}"
    return str(sum(stranger.refused for stranger in strangers))


@dataclass(slots=True)
class Refused:
    """Number of rejected calls, once the clients have ended."""

    calls: int = 0


@contextlib.asynccontextmanager
async def strangers(port: int, path: str, cores: frozenset[int]) -> AsyncIterator[Refused]:
    """Run the clients during the block, on these cores, at a low priority. Raise `BenchError`."""
    command = (sys.executable, "-m", "bench.strangers", str(port), path)
    pipe = asyncio.subprocess.PIPE
    with servers.on_cores(cores):
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    refused = Refused()
    try:
        async with asyncio.timeout(SECONDS):
            if (await process.stdout.readline()).decode().strip() != READY:
                raise BenchError("the strangers did not come")
        yield refused
        async with asyncio.timeout(SECONDS):
            output = (await process.communicate(b""))[0].decode().strip()
        if not output.isdecimal():
            raise BenchError(f"strangers: {output}")
        refused.calls = int(output)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    os.nice(NICE)
    print(asyncio.run(_come(int(sys.argv[1]), sys.argv[2])), flush=True)
