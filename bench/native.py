"""A native load client, nghttp2's h2load, where it is installed: a cheaper one than any in Python.

It speaks HTTP/2 to gRPC and HTTP/1.1 to REST. Of a reply it sees the status and counts the bytes, so every reply
must have the length of the expected one; an error over gRPC has no data.
"""

import asyncio
import contextlib
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from bench.payloads import REST, Exchange, framed
from bench.tally import BenchError, Outcome

NAME = "h2load"
LEAST = 10
"""Calls in each place for one in flight, to see how fast they are."""
SUCCEEDED = re.compile(r"(\d+) succeeded")
DATA = re.compile(r"\((\d+)\) data")


@cache
def found() -> bool:
    """Whether there is one."""
    return shutil.which(NAME) is not None


def version() -> str:
    """Its name and version."""
    done = subprocess.run([NAME, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().replace("nghttp2/", "of nghttp2 ")


@dataclass(frozen=True, slots=True)
class Native:
    """Loads one server with one request."""

    port: int
    exchange: Exchange
    in_flight: int
    expected: bytes
    """The reply, as it comes; over gRPC with its prefix."""

    async def run(self, seconds: float, rate: float, patience: float = 30.0) -> tuple[Outcome, float]:
        """About so many seconds of calls at that rate, and the client's CPU seconds.

        Raises `BenchError` for replies that are not as expected, and for calls that are not answered.
        """
        calls = max(LEAST * self.in_flight, round(seconds * rate))
        with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
            log = Path(name) / "log"
            before = _used()
            printed = await self._run(Path(name), log, calls, seconds + patience)
            used = _used() - before
            self._check(printed, calls)
            # The instant of each call in microseconds, its status, and how long it took.
            began, _, took = np.array(log.read_bytes().split(), np.int64).reshape(-1, 3).T
        whole = int((began + took).max() - began.min()) / 1e6
        return Outcome(calls, whole, (took / 1e6).tolist(), []), used

    async def _run(self, folder: Path, log: Path, calls: int, limit: float) -> str:
        body = folder / "body"
        words = [NAME, "--threads=1", f"--requests={calls}", f"--data={body}", f"--log-file={log}"]
        if self.exchange.kind == REST:
            body.write_bytes(self.exchange.body)
            headers = self.exchange.headers
            words += ["--h1", f"--clients={self.in_flight}"]
        else:
            body.write_bytes(framed([self.exchange.body]))
            headers = {"content-type": "application/grpc", "te": "trailers"}
            words += ["--clients=1", f"--max-concurrent-streams={self.in_flight}"]
        words += [f"--header={name}: {value}" for name, value in headers.items()]
        process = await asyncio.create_subprocess_exec(
            *words,
            f"http://127.0.0.1:{self.port}{self.exchange.path}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(limit):
                printed, _ = await process.communicate()
        except TimeoutError:
            raise BenchError(f"{NAME} had no replies to its {calls} calls within {limit:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise BenchError(f"{NAME} ended with {process.returncode}: {printed.decode(errors='replace')[-500:]}")
        return printed.decode(errors="replace")

    def _check(self, printed: str, calls: int) -> None:
        succeeded, data = SUCCEEDED.search(printed), DATA.search(printed)
        if succeeded is None or data is None:
            raise BenchError(f"{NAME} printed something else than expected: {printed[-500:]}")
        if int(succeeded[1]) != calls:
            raise BenchError(f"{succeeded[1]} of {calls} calls of {NAME} succeeded")
        if int(data[1]) != calls * len(self.expected):
            raise BenchError(
                f"the replies to {calls} calls have {data[1]} bytes, expected {len(self.expected)} each, "
                f"{calls * len(self.expected)}"
            )


def _used() -> float:
    """CPU seconds of the clients that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
