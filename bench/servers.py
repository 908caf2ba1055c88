"""Starts and ends the servers under test, pins them to their core, and reads their CPU time and memory."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from bench.payloads import Exchange
from bench.tally import BenchError

ROOT = Path(__file__).parents[1]
START_LIMIT = 60.0
STOP_LIMIT = 15.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of client and server; None if processes cannot be pinned."""

    client: int | None
    server: int | None
    note: str
    usable: frozenset[int] = frozenset()


def choose_cores() -> Cores:
    """Return one core for the client, and another for the server under load."""
    if sys.platform != "linux":
        return Cores(None, None, "not pinned: this platform has no sched_setaffinity")
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return Cores(None, None, "not pinned: one core only, client and server share it")
    return Cores(
        usable[0], usable[-1], f"client on core {usable[0]}, server on core {usable[-1]}", frozenset(usable)
    )


def pin(core: int | None) -> None:
    """Pin the calling thread, and what it starts from now on, to one core."""
    if core is not None and sys.platform == "linux":
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Let the calling thread, and what it starts, run on these cores; if empty, nothing changes."""
    if not cores or sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def sigterm_raises_exit() -> Iterator[None]:
    """Make SIGTERM leave the block as Ctrl-C does: through the `with` blocks that end what was started."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread handles signals.
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second one would interrupt these blocks.
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the block ends, so that a process that was just started is not lost."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # Only it handles signals.
        before = {
            number: signal.signal(number, lambda number, frame: came.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
            if callable(signal.getsignal(number))  # Ignored signals remain ignored.
        }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for signal_number in came:
            signal.raise_signal(signal_number)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Return whether the port accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def answers_ready(port: int) -> bool:
    """Return whether the server at this REST port reports that it is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Server:
    """A running server: a process with all its children."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def cpu_seconds(self) -> float | None:
        """Return the CPU time of all threads, also ended ones, of the process and its children."""
        if sys.platform != "linux":
            return None
        return sum(cpu_of(tree(self.process.pid)).values())

    def peak_bytes(self) -> int | None:
        """Return the largest resident size so far (VmHWM), summed over the process and its children."""
        return self._status_bytes("VmHWM:")

    def resident_bytes(self) -> int | None:
        """Return the resident size now (VmRSS), summed over the process and its children."""
        return self._status_bytes("VmRSS:")

    def _status_bytes(self, key: str) -> int | None:
        if sys.platform != "linux":
            return None
        total = 0
        for pid in tree(self.process.pid):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith(key):
                        total += int(line.split()[1]) * 1024
        return total

    def tail(self) -> str:
        """Return the last lines of the server's output."""
        text = self.log.read_text(errors="replace").strip()
        return "\n".join(text.splitlines()[-15:]) or "(it wrote nothing)"

    def alive(self) -> bool:
        return self.process.poll() is None


def tree(root: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # the second field is the program's name in brackets and may hold anything
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found


def cpu_of(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU seconds of each process that still exists, of all its threads, also ended ones."""
    # The kernel's id of another process's CPU clock, as clock_getcpuclockid(3) computes it;
    # /proc/PID/stat holds the same sum, but in steps of 10 ms.
    seconds = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # a child that ended meanwhile
            seconds[pid] = time.clock_gettime((~pid << 3) | 2)
    return seconds


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    ready: Callable[[], bool],
    *,
    core: int | None,
    log: Path,
    environment: Mapping[str, str],
    start_limit: float = START_LIMIT,
) -> Iterator[Server]:
    """Run a server until the block ends; the block begins when `ready()` is true.

    Raise `BenchError` when the server ends, or is not ready within `start_limit` seconds.
    """
    with sigterm_raises_exit(), contextlib.ExitStack() as ends:
        with signals_held_back():
            process = _start(command, core, log, environment)
            ends.callback(_end, process)
        server = Server(name, process, log)
        _await_ready(server, ready, start_limit)
        yield server


def _start(
    command: Sequence[str], core: int | None, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in a process group of its own, pinned to `core`."""
    mine = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    with log.open("wb") as output:
        pin(core)  # a child inherits it from the thread that starts it, before it has any thread of its own
        try:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if mine and sys.platform == "linux":
                os.sched_setaffinity(0, mine)


@dataclass(frozen=True, slots=True)
class Checkout:
    """Another checkout of the project, whose server runs with this one's Python and models."""

    path: Path
    source: str = "server"
    """The folder in it that has the package."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make Python find its package before the installed one."""
        return {"PYTHONPATH": str(self.path / self.source)}

    def options(self) -> frozenset[str]:
        """Return the flags of its `triglot serve`. Raise `BenchError` if there is no such server."""
        return _options(self)

    def run(self, *words: str) -> str:
        """Run its Python; returns what that prints. Raise `BenchError` if it fails."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"the server of {self.path} does not start: {done.stderr[-500:]}")
        return done.stdout


@cache
def _options(checkout: Checkout) -> frozenset[str]:
    names = checkout.run("-c", "from triglot.config.options import OPTIONS; print(*OPTIONS)").split()
    where = checkout.run("-c", "import triglot; print(triglot.__file__)").strip()
    if not Path(where).is_relative_to(checkout.path):
        raise BenchError(f"{checkout.path} has no server/triglot; Python finds {where}")
    return frozenset(f"--{name.replace('_', '-')}" for name in names)


@contextlib.contextmanager
def serving(
    models: Path,
    core: int | None,
    flags: Sequence[str] = (),
    checkout: Checkout | None = None,
    environment: Mapping[str, str] | None = None,
    start_limit: float = START_LIMIT,
    python: str = sys.executable,
) -> Iterator[tuple[Server, int, int]]:
    """Run `triglot serve` with the models of a folder; yields the server, its gRPC port and its REST port.

    The log is written to the folder's parent. `python`: the interpreter of its environment.
    """
    grpc_port, rest_port = free_port(), free_port()
    command = [python, "-m", "triglot", "serve", str(models), *flags]
    command += ["--grpc-port", str(grpc_port), "--rest-port", str(rest_port)]
    if checkout is None or "--drain-delay" in checkout.options():
        # No load balancer has to notice that it is not ready.
        command += ["--drain-delay", "0"]
    with started(
        "triglot",
        command,
        # With TLS, checks only that the port is open, which it is once the models are loaded.
        lambda: accepts(rest_port) if "--tls-certificate" in flags else answers_ready(rest_port),
        core=core,
        log=models.parent / "log",
        environment=(checkout.environment if checkout else {}) | dict(environment or {}),
        start_limit=start_limit,
    ) as server:
        try:
            yield server, grpc_port, rest_port
        except (BenchError, OSError) as error:
            raise BenchError(f"{error}\n{server.tail()}") from error


@contextlib.contextmanager
def bare(
    kind: str,
    exchange: Exchange,
    core: int | None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[tuple[Server, int, int]]:
    """Run a kind of `bench.bare` that sends the exchange's reply.

    Yield the server, and its port twice, like the two ports of `serving`.
    """
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        reply, port = Path(name) / "reply", free_port()
        reply.write_bytes(exchange.reply)
        command = [python, "-m", "bench.bare", kind, "--port", str(port), "--reply", str(reply)]
        command += ["--headers", json.dumps(exchange.reply_headers), "--messages", str(exchange.messages), *flags]
        with started(
            f"bench.bare {kind}",
            command,
            lambda: accepts(port),
            core=core,
            log=Path(name) / "log",
            environment=environment or {},
        ) as server:
            yield server, port, port


def environment_of(interpreter: Path) -> str:
    """Return the python of an environment with this project, made by another interpreter. Raise `BenchError`."""
    done = subprocess.run(
        [str(interpreter), str(ROOT / "tests" / "environments.py"), "other_python"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{interpreter} cannot make an environment")
    return done.stdout.strip()


def _await_ready(server: Server, ready: Callable[[], bool], start_limit: float) -> None:
    limit = time.monotonic() + start_limit
    while not ready():
        if not server.alive():
            raise BenchError(f"{server.name} ended at its start:\n{server.tail()}")
        if time.monotonic() > limit:
            raise BenchError(f"{server.name} was not ready within {start_limit:.0f} s:\n{server.tail()}")
        time.sleep(0.05)  # No event signals that another process is ready.


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to stop; after a while, kill it and the rest of its own process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
