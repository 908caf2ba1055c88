"""The server's end of one process of a model: started, greeted, called, and ended."""

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from triglot.core.errors import ModelLoadError
from triglot.executors.process.calls import Calls, LoopCalls, SerialCalls, ThreadCalls
from triglot.executors.process.channel import Channel, Gone
from triglot.executors.process.control_block import Control, ControlBlock
from triglot.executors.process.environment import Environment
from triglot.executors.process.failures import load_error
from triglot.executors.process.frames import FrameError, Kind
from triglot.executors.process.health import Heartbeat
from triglot.executors.process.logs import log_setup, switches
from triglot.executors.process.notices import Inbox, Notice
from triglot.executors.process.values import dumps, loads
from triglot.model.config import ModelConfig

_STATUS_SECONDS = 5.0
"""How long the status of a process that hung up may take."""
_LOOK_SECONDS = 0.02
"""Between two looks for what it leaves in its control block."""


class Place(Protocol):
    """Where the processes of a model run."""

    def close(self) -> None:
        """None runs there any more."""


class Body(Protocol):
    """A process as the system has it; as `subprocess.Popen`. Any thread may use it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Program:
    """What a process is to load, and where: `load` is the import path of a function of backend, file and
    configuration."""

    name: str
    load: str
    backend: str
    file: Path
    config: ModelConfig = field(repr=False)
    environment: Place = field(repr=False, compare=False)
    execution: str = "process"

    @property
    def kind(self) -> str:
        """What messages call one of its processes."""
        return "actor" if self.execution == "ray" else self.execution


class Process:
    """One process. Any thread may `kill` it. See `Owner`.

    `kind` is what messages call it; `remote`: it may be on another machine. `number` is its own among its model's
    instances. `calls` are there once it has loaded the model, until it has ended. `reserved`: for how many
    calls, of `capacity`. `started`: whether it was to start its instance.
    """

    kind: ClassVar[str] = "process"
    remote: ClassVar[bool] = False
    calls_of_threads: ClassVar[type[SerialCalls | ThreadCalls]] = SerialCalls

    def __init__(
        self,
        name: str,
        number: int,
        body: Body,
        channel: Channel,
        control: Control,
        notices: Inbox,
    ) -> None:
        self.name = name
        self.number = number
        self.lost = ""
        self.reserved = 0
        self.capacity: float = 1
        self.started = False
        self.hung = False
        self.channel = channel
        self.control = control
        self.calls: Calls | None = None
        self.heartbeat = Heartbeat(control, None if self.remote else body.pid)
        self.notices = notices
        self._body = body
        self._killing = threading.Lock()

    @classmethod
    def start(cls, program: Program, number: int, take: Callable[[Notice], object]) -> Process:
        """A new one, which waits for `load`; `take` gets what it tells at any time, on any thread.

        It ends with the thread that calls this. Raises `OSError`.
        """
        with ExitStack() as passed, ExitStack() as kept:
            ours, theirs = socket.socketpair()
            kept.callback(ours.close)
            passed.callback(theirs.close)
            control, memory = ControlBlock.make()
            passed.callback(os.close, memory)
            notices, pipe = Inbox.make(take)
            kept.callback(notices.close)
            passed.callback(os.close, pipe)
            popen = _spawned(program, theirs.fileno(), memory, pipe)
            kept.pop_all()
            return cls(program.name, number, popen, Channel(ours), control, notices)

    @property
    def place(self) -> Mapping[str, str]:
        """The machine that it runs on, as labels of metrics, where that can be another one."""
        return {}

    @property
    def pid(self) -> int:
        """The system's number of it."""
        return self._body.pid

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} {self.number} ({self._where()})"

    def _where(self) -> str:
        return f"pid {self.pid}"

    # --- what it loads ---

    def load(self, program: Program, loop: Callable[[], asyncio.AbstractEventLoop]) -> dict[str, Any]:
        """What its model declares, once it is loaded; `loop` is the server's. Raises `ModelLoadError`."""
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
        try:
            self.channel.send(Kind.LOAD, text=dumps(setup))
            message = self.channel.receive()
        except Gone:
            raise ModelLoadError(
                f"{program.file}: its {self.kind} {self.why_gone()} while it loaded the model; the server's log "
                "has its output"
            ) from None
        fields = loads(message.text)
        if message.kind is Kind.LOADED:
            on_loop = fields["on_loop"]
            self.capacity = math.inf if on_loop else self._capacity(program)
            options = {"with_call": fields["takes_call"], "log_ids": "json" in log}
            self.calls = (LoopCalls if on_loop else self.calls_of_threads)(self, loop, **options)
            declared: dict[str, Any] = fields
            return declared
        raise load_error(fields)

    def _file(self, program: Program) -> Path:
        """The model's file, as the process finds it."""
        return program.file.absolute()

    def _capacity(self, program: Program) -> float:
        """How many calls of plain code it takes at the same time."""
        return 1

    # --- calls ---

    @property
    def count(self) -> int:
        """Calls that it runs."""
        calls = self.calls
        return 0 if calls is None else calls.count

    @property
    def busy(self) -> bool:
        """Whether it runs a call, or somebody is about to have it run one."""
        return self.reserved > 0 or self.count > 0

    @property
    def run_seconds(self) -> float:
        """As `Calls.run_seconds`."""
        calls = self.calls
        return 0.0 if calls is None else calls.run_seconds

    # --- while it lives ---

    def check(self, hang_seconds: float, longest_run: float) -> None:
        """While it is called: end it if it hangs, have its model see which calls are cancelled."""
        if why := self.ended():
            self.kill(why)
            return
        self.heartbeat.check()
        if why := self._why_hung(hang_seconds, longest_run):
            self.hung = True
            self.kill(why)
        if (calls := self.calls) is not None:
            calls.mark_cancelled()
        self.channel.trim(time.monotonic())
        self.notices.read()
        self._switch_log()

    def _why_hung(self, hang_seconds: float, longest_run: float) -> str:
        """Why it is to be killed; "" for a process that is not taken for hung."""
        if 0 < hang_seconds <= self.heartbeat.silence:
            return f"sent no heartbeat for {self.heartbeat.silence:.1f} s and was killed"
        if 0 < longest_run < self.run_seconds:
            return f"exceeded longest_run ({longest_run:g} s) and was killed"
        return ""

    def check_loading(self, age: float, timeout: float) -> None:
        """While it loads its model, since `age` seconds; it may take `timeout`."""
        if why := self.ended():
            self.kill(why)
        elif age > timeout:
            self.kill(f"did not load its model within {age:.0f} s and was killed")
        else:
            self._switch_log()

    def _switch_log(self) -> None:
        """See `ProcessLog`."""
        self.control.log_switches = switches()

    # --- its end ---

    def check_ready(self) -> bool:
        """Whether its model says that it is ready; not when it ends meanwhile. Blocks."""
        number = self.control.begin_check()
        while (ready := self.control.checked(number)) is None and not self.ended():
            time.sleep(_LOOK_SECONDS)
        return bool(ready)

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
        """Why it has ended; "" while it runs."""
        status = self._body.poll()
        return "" if status is None else self._lost_or(self._ended(status))

    def _ended(self, status: int) -> str:
        """What is said of one that has ended."""
        return _ended(status)

    def _lost_or(self, why: str) -> str:
        return self.lost or why

    def kill(self, why: str) -> None:
        """End it at once; whoever waits for an answer of it gets none."""
        with self._killing:
            self.lost = self.lost or why
            with suppress(OSError):
                self._body.kill()
            # Children of its own may have the connection, too.
            with suppress(OSError):
                self.channel.socket.shutdown(socket.SHUT_RDWR)

    def ask_to_end(self) -> None:
        """Have it close its model and end; nobody calls it any more."""
        self.lost = self.lost or "was shut down"
        with suppress(Gone, FrameError):
            self.channel.send(Kind.END)

    def end(self, timeout: float, kill_timeout: float) -> None:
        """Wait for its end; after `timeout` it gets SIGTERM, and `kill_timeout` later SIGKILL."""
        for wait, signal_it in ((timeout, self._body.terminate), (kill_timeout, self._body.kill)):
            try:
                self._body.wait(wait)
                break
            except subprocess.TimeoutExpired:
                signal_it()
        self._body.wait()
        self._close()

    def _close(self) -> None:
        """It has ended, and nobody calls it."""
        # Children of its own may have the connection, too.
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        calls, self.calls = self.calls, None  # Each keeps the other.
        if calls is not None:
            calls.close()
        self.channel.close()
        self.notices.close()

    def forget(self) -> bool:
        """Give back what belongs to it if it has ended and nobody calls it; whether it is so."""
        if self.busy or self._body.poll() is None:
            return False
        self._close()
        return True


def log_descriptor() -> int:
    """Where processes that the server starts write to."""
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
        # The server says when it ends, not the terminal.
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
