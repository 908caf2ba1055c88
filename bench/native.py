"""Loads a server with gRPC's own C++ client, which is built if g++ and libgrpc++-dev are installed."""

import asyncio
import contextlib
import resource
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from bench.compiled import can_compile, compiled
from bench.measure import Round, Subject, round_of
from bench.tally import BenchError, Outcome, Request

SOURCE = Path(__file__).with_name("native.cc")
FLAGS = ("-Wl,--copy-dt-needed-entries", "-lgrpc++", "-lgrpc", "-lgpr")
HEADER = "grpcpp/generic/generic_stub.h"
PATIENCE = 30.0


@cache
def left_out() -> str:
    """Return why the client cannot be built; "" if it can."""
    return "" if can_compile(HEADER) else "gRPC's C++ client needs g++ and libgrpc++-dev (apt-get install both)"


async def load(
    subject: Subject,
    in_flight: int,
    settle: float,
    seconds: float,
    connections: int = 1,
    patience: float = PATIENCE,
) -> Round:
    """Measure one round of unary calls. Raise `BenchError` for a reply that does not match its request."""
    requests = subject.requests or [Request(subject.exchange.body)]
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        file, log = Path(name) / "requests", Path(name) / "latencies"
        file.write_bytes(b"".join(map(_written, requests)))
        program = await asyncio.to_thread(compiled, SOURCE, FLAGS)
        words = [str(program), f"127.0.0.1:{subject.port}", subject.exchange.path, str(file), str(log)]
        words += [str(connections), str(in_flight)]
        await _run([*words, str(settle)], settle + patience)
        before, used = subject.server.cpu_seconds(), _used()
        elapsed = await _run([*words, str(seconds)], seconds + patience)
        used, after = _used() - used, subject.server.cpu_seconds()
        latencies = np.frombuffer(log.read_bytes(), np.float64).tolist()
    return round_of(Outcome(len(latencies), elapsed, latencies, []), before, after, used)


def _written(request: Request) -> bytes:
    """Return a request in the format that `native.cc` reads."""
    fields = [text for pair in request.metadata.fields for text in pair]
    parts = [_number(request.timeout or 0), _number(len(request.metadata.fields)), *map(_text, fields)]
    return b"".join((*parts, _text(request.body), _number(len(request.holds)), *map(_text, request.holds)))


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _text(text: bytes) -> bytes:
    return _number(len(text)) + text


async def _run(words: Sequence[str], limit: float) -> float:
    """Run the client; returns the seconds that it took."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(limit):
            printed, _ = await process.communicate()
    except TimeoutError:
        raise BenchError(f"gRPC's C++ client had no answers within {limit:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = printed.decode(errors="replace")
    if process.returncode:
        raise BenchError(f"gRPC's C++ client: {text[-500:].strip() or process.returncode}")
    return float(text)


def _used() -> float:
    """Return the CPU seconds of all ended clients."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
