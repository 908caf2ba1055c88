"""Measures whether memory, descriptors or threads of a server grow in hours of mixed good and bad traffic.

From the repository's root, by hand: `python -m bench.soak --help`. Each gRPC transport has a server of its own,
with two workers and an access file, at the same time. It is called at a modest rate over all protocols, on kept
and on new connections, and one call in two is bad (`bench.soak_calls`); nothing is killed. Every good call must
succeed, every bad one must be refused as expected, and in the last hour the resident size must not grow.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from bench import report, servers
from bench.servers import ROOT, Server
from bench.soak_calls import IDENTITY, KINDS, TOKENS, Calls, Issuer, Kind, access_tables, write_models
from bench.tally import BenchError

TRANSPORTS = ("h2", "aio")
MINUTES, RATE = 90.0, 120.0
WINDOW = 60.0
"""Minutes at the end for which growth counts: at most two thirds of a run."""
PERIOD = 10.0
"""Seconds from one reading of the processes to the next."""
READINGS = 6
"""Readings at either end of the window whose median is shown."""
IN_FLIGHT = 200
NICE = 10
SLOPE, DESCRIPTORS, THREADS = 0.1, 10.0, 2.0
"""Most growth, by a line fitted through the window: MiB a minute, descriptors an hour, threads an hour."""
MIB = 2**20
SHOWN = 20
"""Most failures that are listed."""
COLUMNS = (
    *("transport", "minutes", "good calls", "failed", "bad calls", "not as expected", "RSS MiB", "then"),
    *("MiB a minute", "fds", "then", "threads", "then"),
)
PROCESS_COLUMNS = ("process", "RSS MiB", "then", "MiB a minute", "fds", "then", "threads", "then")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds: resident bytes, open descriptors, threads."""

    resident: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What each process holds, by its id, `minutes` after the start."""

    minutes: float
    processes: Mapping[int, Usage]

    def total(self, of: Callable[[Usage], int]) -> int:
        """Sum over the processes."""
        return sum(map(of, self.processes.values()))


@dataclass(slots=True)
class Result:
    """Results of a soak."""

    transport: str
    root: int = 0
    minutes: float = 0.0
    readings: list[Reading] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls that ended as expected, by their kind."""
    failed: list[str] = field(default_factory=list)
    """Good calls that failed: when, and how."""
    unexpected: list[str] = field(default_factory=list)
    """Bad calls that were not refused as expected."""
    log: str = ""
    """What the server logged at its end."""

    @property
    def window(self) -> float:
        """Minutes at the end that count."""
        return min(WINDOW, self.minutes * 2 / 3)

    @property
    def settled(self) -> Sequence[Reading]:
        """The readings in the window."""
        return [reading for reading in self.readings if reading.minutes >= self.minutes - self.window]

    @property
    def good(self) -> bool:
        """Whether nothing failed, nothing grew, and no process was replaced."""
        held = self.settled
        return (
            not (self.failed or self.unexpected)
            and held[0].processes.keys() == held[-1].processes.keys()
            and slope(held, resident) / MIB <= SLOPE
            and slope(held, descriptors) * 60 <= DESCRIPTORS
            and slope(held, threads) * 60 <= THREADS
        )


def resident(reading: Reading) -> int:
    """Resident bytes of all processes."""
    return reading.total(lambda usage: usage.resident)


def descriptors(reading: Reading) -> int:
    """Open descriptors of all processes."""
    return reading.total(lambda usage: usage.descriptors)


def threads(reading: Reading) -> int:
    """Threads of all processes."""
    return reading.total(lambda usage: usage.threads)


def slope(readings: Sequence[Reading], of: Callable[[Reading], float]) -> float:
    """Return the growth a minute, by the line of least squares."""
    minutes = [reading.minutes for reading in readings]
    return float(np.polyfit(minutes, [of(reading) for reading in readings], 1)[0])


def read_usage(pid: int) -> Usage:
    """Read what a process holds. Raise `OSError` if it has ended."""
    process = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    held = len(list((process / "fd").iterdir()))
    return Usage(int(fields["VmRSS"].split()[0]) * 1024, held, int(fields["Threads"]))


def read(server: Server, minutes: float) -> Reading:
    """Read what the server's processes hold."""
    found = {}
    for pid in servers.tree(server.process.pid):
        with suppress(OSError, KeyError):  # It has ended meanwhile.
            found[pid] = read_usage(pid)
    return Reading(minutes, found)


class Soak:
    """Calls a server at a rate until its time is over, or SIGTERM comes, and reads its processes meanwhile."""

    def __init__(self, calls: Calls, server: Server, result: Result) -> None:
        self._calls, self._server, self._result = calls, server, result
        self._random = Random(1)
        self._over = asyncio.Event()
        self._began = time.monotonic()
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    async def run(self, minutes: float, rate: float) -> None:
        """Run the soak."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        loop.call_later(minutes * 60, self._over.set)
        async with self._calls.connected(), asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            await self._pace(group, rate)
            reading.cancel()
            self._result.minutes = self._minutes
            self._result.readings.append(read(self._server, self._result.minutes))

    async def _pace(self, group: asyncio.TaskGroup, rate: float) -> None:
        weights = [kind.weight for kind in KINDS]
        due = time.monotonic()
        while not self._over.is_set():
            (kind,) = self._random.choices(KINDS, weights)
            await self._in_flight.acquire()
            group.create_task(self._call(kind))
            due = max(due + 1 / rate, time.monotonic() - 1)  # What was missed for longer is not made up for.
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0, due - time.monotonic())):
                    await self._over.wait()

    async def _call(self, kind: Kind) -> None:
        name = kind.make.__name__
        began = time.monotonic()
        try:
            await kind.make(self._calls)
        except Exception as error:
            seconds = time.monotonic() - began
            text = f"{time.strftime('%H:%M:%S')} {name} after {seconds:.2f} s: {type(error).__name__} {error}"
            (self._result.failed if kind.good else self._result.unexpected).append(text)
            print(self._result.transport, "good" if kind.good else "bad", text, file=sys.stderr, flush=True)
        else:
            self._result.calls[name] += 1
        finally:
            self._in_flight.release()

    async def _read(self) -> None:
        while True:
            now = await asyncio.to_thread(read, self._server, self._minutes)
            self._result.readings.append(now)
            if len(self._result.readings) % READINGS == 1:
                print(f"{time.strftime('%H:%M:%S')} {progress(self._result)}", file=sys.stderr, flush=True)
            await asyncio.sleep(PERIOD)


def progress(result: Result) -> str:
    """Return a line about a soak that continues."""
    now = result.readings[-1]
    each = " + ".join(f"{usage.resident / MIB:.1f}" for usage in now.processes.values())
    return (
        f"{result.transport} {now.minutes:.1f} min, {result.calls.total():,} calls, {len(result.failed)} failed, "
        f"{len(result.unexpected)} unexpected, {each} MiB, {descriptors(now)} fds, {threads(now)} threads"
    )


def measure(transport: str, minutes: float, rate: float, nice: int = 0) -> Result:
    """Start a server with this transport, and soak it from this process, whose niceness grows by `nice`."""
    result = Result(transport)
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        folder = Path(name)
        issuer, models, access = Issuer(folder), folder / "models", folder / "access.toml"
        for model in (IDENTITY, TOKENS):
            shutil.copytree(ROOT / "bench" / "models" / model, models / model)
        write_models(models)
        access.write_text(access_tables(issuer))
        flags = ["--workers", "2", "--access", str(access), "--audit-log", str(folder / "audit")]
        flags += ["--grpc-transport", transport, "--model-control-mode", "explicit", "--load-model", "*"]
        with servers.serving(models, None, [*flags, "--log-level", "warning"]) as (server, grpc_port, rest_port):
            os.nice(nice)
            result.root = server.process.pid
            calls = Calls(grpc_port, rest_port, models, issuer)
            asyncio.run(Soak(calls, server, result).run(minutes, rate))
            result.log = server.tail()
    return result


# --- output ---


def _ends(readings: Sequence[Reading], of: Callable[[Reading], float]) -> tuple[float, float]:
    """Return the medians of the first and of the last readings."""
    values = [of(reading) for reading in readings]
    return median(values[:READINGS]), median(values[-READINGS:])


def cells(readings: Sequence[Reading]) -> list[str]:
    """Return what was held at the window's begin and end."""
    shown = [f"{value / MIB:.1f}" for value in _ends(readings, resident)]
    shown.append(f"{slope(readings, resident) / MIB:+.3f}")
    for of in (descriptors, threads):
        shown += [f"{value:.0f}" for value in _ends(readings, of)]
    return shown


def line(result: Result) -> list[str]:
    """Return a line of the table."""
    good = {kind.make.__name__ for kind in KINDS if kind.good}
    succeeded = sum(number for name, number in result.calls.items() if name in good)
    return [
        result.transport,
        f"{result.minutes:.0f}",
        f"{succeeded + len(result.failed):,}",
        f"{len(result.failed)}",
        f"{result.calls.total() - succeeded + len(result.unexpected):,}",
        f"{len(result.unexpected)}",
        *cells(result.settled),
    ]


def process_lines(result: Result) -> Iterator[list[str]]:
    """Yield a line for each process that lived through the window."""
    readings = result.settled
    numbers = iter(range(1, 100))
    for pid in readings[-1].processes:
        if all(pid in reading.processes for reading in readings):
            process_readings = [Reading(reading.minutes, {pid: reading.processes[pid]}) for reading in readings]
            name = "supervisor" if pid == result.root else f"child {next(numbers)}"
            yield [f"{result.transport}: {name}", *cells(process_readings)]


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the tables, and what failed."""
    yield report.plain(COLUMNS, [line(result) for result in results])
    yield ""
    yield report.plain(PROCESS_COLUMNS, [row for result in results for row in process_lines(result)])
    yield ""
    window = min(result.window for result in results)
    yield f"Growth is that of the last {window:.0f} minutes, by least squares over readings every {PERIOD:.0f} s;"
    yield f"its first and last values are medians of {READINGS} readings. Wanted: at most {SLOPE} MiB a minute,"
    yield f"{DESCRIPTORS:.0f} descriptors and {THREADS:.0f} threads an hour, and no failed call."
    for result in results:
        yield ""
        yield f"{result.transport}: {'as it should be' if result.good else 'WRONG'}"
        made = ", ".join(f"{name} {number:,}" for name, number in result.calls.most_common())
        yield f"calls: {made}"
        for what, texts in (("failed", result.failed), ("not as expected", result.unexpected)):
            yield from (f"{what}: {text}" for text in texts[:SHOWN])
            if len(texts) > SHOWN:
                yield f"{what}: {len(texts) - SHOWN} more"


def _end_soaks(*_: object) -> None:
    for child in active_children():
        child.terminate()


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns 1 if something failed or grew, else 0. SIGTERM ends the soaks early."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="(default: both)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="(default: %(default)g)")
    parser.add_argument("--rate", type=float, default=RATE, help="calls a second of each (default: %(default)g)")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "soak.txt", help="(default: bench/soak.txt)"
    )
    given = parser.parse_args(words)
    head = [*report.machine(), f"{given.rate:g} calls a second to each server"]
    print(*head, sep="\n", flush=True)
    signal.signal(signal.SIGTERM, _end_soaks)
    # In processes, because grpc.aio has one loop per process.
    with ProcessPoolExecutor(len(given.transport), get_context("spawn")) as pool:
        soaks = [pool.submit(measure, transport, given.minutes, given.rate, NICE) for transport in given.transport]
        try:
            results = [soak.result() for soak in soaks]
        except BenchError as error:
            print(error, file=sys.stderr)
            return 1
    report_lines = ["", *lines(results)]
    print(*report_lines, sep="\n")
    given.output.write_text("\n".join([*head, *report_lines, ""]), encoding="utf-8")
    for result in results:
        print(result.transport, "logged:", result.log, sep="\n", file=sys.stderr)
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
