"""`Process`, the server's side of one process of a model: its start, its connection, its calls and its end."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from triglot.core.errors import ModelLoadError, Unavailable
from triglot.executors.process.blocking import run_blocking
from triglot.executors.process.calls import Calls, NotBegun
from triglot.executors.process.channel import Channel
from triglot.executors.process.environment import Environment
from triglot.executors.process.frames import Kind
from triglot.executors.process.health import Heartbeat
from triglot.executors.process.logs import log_setup, switches
from triglot.executors.process.values import dumps
from triglot.model.config import ModelConfig
from triglot.model.ray_options import RAY_DEFAULTS, RayOptions

_STATUS_SECONDS = 5.0
"""How long to wait for the exit status of a process that has closed its connection."""


class Place(Protocol):
    """Where the processes of a model run: a Python environment, or a Ray cluster."""

    def close(self) -> None:
        """Release it; no more processes run there."""


class Body(Protocol):
    """Handle of a process of the operating system, or of a Ray actor; the methods are those of `subprocess.Popen`.

    May be used on any thread.
    """

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Program:
    """What a process loads, and where it runs.

    `name` identifies the model in messages. `load` is the import path, "module:name", of a function that returns
    the model, given `backend`, `file` and `config`.
    """

    name: str
    load: str
    backend: str
    file: Path
    config: ModelConfig = field(repr=False)
    environment: Place = field(repr=False, compare=False)
    execution: str = "process"
    ray: RayOptions = RAY_DEFAULTS

    @property
    def kind(self) -> str:
        """Word for one of its processes in messages: "process" or "actor"."""
        return "actor" if self.execution == "ray" else self.execution


class Process:
    """One process, owned by a `Pool`. It is the `Owner` of its calls. `kill` may be called on any thread.

    `kind` is its name in messages; `remote`: it may run on another machine. `number` is the instance's, from 0.
    `reserved` is the number of calls that it is
    reserved for, at most `capacity`. `started`: whether `start_instance` was requested of it. `lost` is the reason
    why it takes no more calls, "" while it does; `hung`: it was killed as hung.
    """

    kind: ClassVar[str] = "process"
    remote: ClassVar[bool] = False

    def __init__(
        self, name: str, number: int, body: Body, channel: Channel, take_metrics: Callable[[Any], object]
    ) -> None:
        self.name = name
        self.number = number
        self.lost = ""
        self.reserved = 0
        self.capacity: float = 1
        self.started = False
        self.hung = False
        self._body = body
        self._take_metrics = take_metrics
        self._use(channel)
        self._reader: threading.Thread | None = None
        self._switches = 0
        self._killing = threading.Lock()

    def _use(self, channel: Channel) -> None:
        """Reach the process over this channel."""
        self.channel = channel
        self.calls = Calls(self, channel, self._take_metrics)
        self.heartbeat = Heartbeat(channel, None if self.remote else self._body.pid)

    @classmethod
    def start(cls, program: Program, number: int, take_metrics: Callable[[Any], object]) -> Process:
        """Return a new process, which waits for `load`.

        `take_metrics` gets each change of its model's metrics, on any thread. It ends with the thread that calls
        this. Raises `OSError`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                popen = _spawned(program, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        return cls(program.name, number, popen, Channel(ours), take_metrics)

    @property
    def place(self) -> Mapping[str, str]:
        """Labels of metrics that name its machine; empty if that is always the server's."""
        return {}

    @property
    def pid(self) -> int:
        """Process id."""
        return self._body.pid

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} {self.number} ({self._where()})"

    def _where(self) -> str:
        return f"pid {self.pid}"

    # --- load ---

    def load(self, program: Program, loop: Callable[[], asyncio.AbstractEventLoop]) -> dict[str, Any]:
        """Load the model; returns what it declares. `loop` returns the server's event loop.

        Blocks. Raises `ModelLoadError`.
        """
        log = log_setup(remote=self.remote)
        setup = {
            "name": self.name,
            "kind": self.kind,
            "instance": self.number,
            "load": program.load,
            "backend": program.backend,
            "file": self._file(program),
            "config": program.config,
            "cpus": list(program.config.cpus),
            "log": log,
        }
        calls = self.calls
        calls.loop = loop
        try:
            declared: dict[str, Any] = run_blocking(calls.load(setup))
        except (NotBegun, Unavailable):
            raise ModelLoadError(
                f"{program.file}: its {self.kind} {self.lost} while it loaded the model; the server's log has its "
                "output"
            ) from None
        calls.on_loop, calls.with_call, calls.log_ids = declared["on_loop"], declared["takes_call"], "json" in log
        self.capacity = math.inf if calls.on_loop else self._capacity(program)
        if calls.on_loop or self.remote:
            name = f"{self.name} reads"
            self._reader = threading.Thread(target=self.channel.read_until_gone, name=name, daemon=True)
            self._reader.start()
        return declared

    def _file(self, program: Program) -> Path:
        """Return the path of the model's file on the process's machine."""
        return program.file.absolute()

    def _capacity(self, program: Program) -> float:
        """Return how many calls of plain (not `async def`) code may be sent to it at the same time."""
        return 1

    # --- calls ---

    @property
    def busy(self) -> bool:
        """Whether it runs a call, or is reserved for one."""
        return self.reserved > 0 or self.calls.count > 0

    # --- checks ---

    def check(self, hang_seconds: float, longest_run: float) -> None:
        """Check a ready process: kill it if it has ended or hangs, and report the cancelled calls to its model.

        `hang_seconds` limits the time without a heartbeat, `longest_run` the seconds of one call; 0: no limit.
        Also reads what it has sent between calls, frees unused shared memory, and updates its log settings. On the
        monitor's thread.
        """
        if why := self.ended():
            self.kill(why)
            return
        self.channel.poll()
        self.heartbeat.check()
        if why := self._why_hung(hang_seconds, longest_run):
            self.hung = True
            self.kill(why)
        self.calls.report_cancelled()
        self.channel.trim(time.monotonic())
        self._switch_log()

    def _why_hung(self, hang_seconds: float, longest_run: float) -> str:
        """Return the reason to kill a hung process; "" if it does not hang."""
        if 0 < hang_seconds <= self.heartbeat.silence:
            return f"sent no heartbeat for {self.heartbeat.silence:.1f} s and was killed"
        if 0 < longest_run < self.calls.run_seconds:
            return f"exceeded longest_run ({longest_run:g} s) and was killed"
        return ""

    def check_loading(self, age: float, timeout: float) -> None:
        """Check a process that has been loading its model for `age` seconds, of at most `timeout`."""
        if why := self.ended():
            self.kill(why)
        elif age > timeout:
            self.kill(f"did not load its model within {age:.0f} s and was killed")
        else:
            self._switch_log()

    def _switch_log(self) -> None:
        """Pass changed log settings of the server to the process; see `ProcessLog`. A remote one hears from it."""
        if self.remote and not self.channel.congested:
            self.channel.send(Kind.BEAT)
        if (now := switches()) != self._switches:
            self._switches = now
            self.channel.send(Kind.LOG, text=dumps(now))

    # --- end ---

    def check_ready(self) -> bool:
        """Return whether its model's readiness check passes; False if the process ends meanwhile. Blocks."""
        return self.calls.check_ready()

    def why_gone(self) -> str:
        """See `Owner`."""
        if self.lost:
            return self.lost
        try:
            status = self._body.wait(_STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("closed its connection")
            return self.lost
        return self._lost_or(self._ended(status))

    def ended(self) -> str:
        """Return the reason why it has ended; "" while it runs."""
        status = self._body.poll()
        return "" if status is None else self._lost_or(self._ended(status))

    def _ended(self, status: int) -> str:
        """Return the text for a process that ended with this exit status."""
        return _ended(status)

    def _lost_or(self, why: str) -> str:
        return self.lost or why

    def kill(self, why: str) -> None:
        """Kill it at once; its calls fail with the reason `why`. On any thread."""
        with self._killing:
            self.lost = self.lost or why
            with suppress(OSError):
                self._body.kill()
            # Closing is not enough: child processes of its own may have inherited the socket.
            with suppress(OSError):
                self.channel.socket.shutdown(socket.SHUT_RDWR)

    def ask_to_end(self) -> None:
        """Ask it to close its model and end; it gets no more calls."""
        self.lost = self.lost or "was shut down"
        self.channel.send(Kind.END)

    def end(self, timeout: float, kill_timeout: float) -> None:
        """Wait until it has ended; it gets SIGTERM after `timeout` seconds, and SIGKILL `kill_timeout` later."""
        for wait, signal_it in ((timeout, self._body.terminate), (kill_timeout, self._body.kill)):
            try:
                self._body.wait(wait)
                break
            except subprocess.TimeoutExpired:
                signal_it()
        self._body.wait()
        self._close()

    def _close(self) -> None:
        """Close the connection of a process that has ended, and runs no calls."""
        # Closing is not enough: child processes of its own may have inherited the socket.
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()
        self.channel.poll()  # What it has sent last.
        self.channel.close()

    def forget(self) -> bool:
        """Release its resources if it has ended, and runs no calls; returns False if that is not so yet."""
        if self.busy or self._body.poll() is None:
            return False
        self._close()
        return True


def log_descriptor() -> int:
    """Return the stdout and stderr for processes that the server starts: stderr if open, else `DEVNULL`."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _spawned(program: Program, *passed: int) -> subprocess.Popen[bytes]:
    log = log_descriptor()
    environment = program.environment
    assert isinstance(environment, Environment)
    return subprocess.Popen(
        environment.command(*map(str, passed), str(os.getpid()), program.name),
        env=environment.variables(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=passed,
        # Signals of the terminal are for the server, which ends the process.
        start_new_session=True,
    )


def _ended(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was terminated by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
