"""The server's end of one process of a model: started, greeted, called, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triglot.core.errors import ModelLoadError
from triglot.core.model_config import ModelConfig
from triglot.engine.processes.channel import Channel, Gone
from triglot.engine.processes.environment import Environment
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.health import Pulse
from triglot.engine.processes.logs import log_setup, switches
from triglot.engine.processes.multiplexed import MultiplexedCalls
from triglot.engine.processes.notices import Inbox, Notice
from triglot.engine.processes.owner import load_error
from triglot.engine.processes.page import Page
from triglot.engine.processes.sequential import SequentialCalls
from triglot.engine.processes.values import dumps, loads

_STATUS_SECONDS = 5.0
"""How long the status of a process that hung up may take."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a process is to load, and where: `load` is the import path of a function of backend, file and
    configuration."""

    name: str
    load: str
    backend: str
    file: Path
    config: ModelConfig = field(repr=False)
    environment: Environment = field(repr=False, compare=False)


class Process:
    """One process. Any thread may `kill` it. See `Owner`.

    `number` is its own among the instances of its model. `calls` are there once it has loaded the model, until it
    has ended. `borrowed`: whether a thread has it for its calls. `started`: whether it was to start its instance.
    """

    def __init__(
        self,
        name: str,
        number: int,
        popen: subprocess.Popen[bytes],
        channel: Channel,
        page: Page,
        notices: Inbox,
    ) -> None:
        self.name = name
        self.number = number
        self.lost = ""
        self.borrowed = False
        self.started = False
        self.hung = False
        self.channel = channel
        self.page = page
        self.calls: SequentialCalls | MultiplexedCalls | None = None
        self.pulse = Pulse(page, popen.pid)
        self.notices = notices
        self._popen = popen
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
            page, memory = Page.make()
            passed.callback(os.close, memory)
            notices, pipe = Inbox.make(take)
            kept.callback(notices.close)
            passed.callback(os.close, pipe)
            popen = _spawned(program, theirs.fileno(), memory, pipe)
            kept.pop_all()
            return cls(program.name, number, popen, Channel(ours), page, notices)

    @property
    def pid(self) -> int:
        """The system's number of it."""
        return self._popen.pid

    def __str__(self) -> str:
        return f"{self.name}: process {self.number} (pid {self.pid})"

    # --- what it loads ---

    def load(self, program: Program) -> dict[str, Any]:
        """What its model declares, once it is loaded. Raises `ModelLoadError`."""
        setup = {
            "name": self.name,
            "instance": self.number,
            "load": program.load,
            "backend": program.backend,
            "file": program.file.absolute(),
            "config": program.config,
            "cpus": list(program.config.cpus),
            "log": log_setup(),
        }
        try:
            self.channel.send(Kind.LOAD, text=dumps(setup))
            message = self.channel.receive()
        except Gone:
            raise ModelLoadError(
                f"{program.file}: its process {self.why_gone()} while it loaded the model; what it wrote before "
                "is in the server's log"
            ) from None
        fields = loads(message.text)
        if message.kind is Kind.LOADED:
            calls = MultiplexedCalls if fields["at_once"] else SequentialCalls
            self.calls = calls(self, with_call=fields["takes_call"])
            declared: dict[str, Any] = fields
            return declared
        raise load_error(fields)

    # --- calls ---

    @property
    def count(self) -> int:
        """Calls that it runs."""
        calls = self.calls
        return 0 if calls is None else calls.count

    @property
    def busy(self) -> bool:
        """Whether it runs a call, or somebody is about to have it run one."""
        return self.borrowed or self.count > 0

    @property
    def run_seconds(self) -> float:
        """As `Calls.run_seconds`."""
        calls = self.calls
        return 0.0 if calls is None else calls.run_seconds

    def tell_cancelled(self) -> None:
        """As `Calls.tell_cancelled`."""
        if (calls := self.calls) is not None:
            calls.tell_cancelled()

    # --- its end ---

    def why_gone(self) -> str:
        """See `Owner`."""
        if self.lost:
            return self.lost
        try:
            status = self._popen.wait(_STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("closed its connection")
            return self.lost
        return self._lost_or(_ended(status))

    def ended(self) -> str:
        """Why it has ended; "" while it runs."""
        status = self._popen.poll()
        return "" if status is None else self._lost_or(_ended(status))

    def _lost_or(self, why: str) -> str:
        return self.lost or why

    def kill(self, why: str) -> None:
        """End it at once; whoever waits for an answer of it gets none."""
        with self._killing:
            self.lost = self.lost or why
            with suppress(OSError):
                self._popen.kill()
            # Children of its own may have the connection, too.
            with suppress(OSError):
                self.channel.socket.shutdown(socket.SHUT_RDWR)

    def ask_to_end(self) -> None:
        """Have it close its model and end; nobody calls it any more."""
        self.lost = self.lost or "was asked to end"
        with suppress(Gone, FrameError):
            self.channel.send(Kind.END)

    def end(self, patience: float, more_patience: float) -> None:
        """Wait for its end; after `patience` it is told by SIGTERM, and `more_patience` later by SIGKILL."""
        for wait, tell in ((patience, self._popen.terminate), (more_patience, self._popen.kill)):
            try:
                self._popen.wait(wait)
                break
            except subprocess.TimeoutExpired:
                tell()
        self._popen.wait()
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
        if self.busy or self._popen.poll() is None:
            return False
        self._close()
        return True

    def keep_up(self) -> None:
        """Give back memory that has not been used for a while, take what it has told, and say what is logged."""
        self.channel.arena.trim(time.monotonic())
        self.notices.read()
        self.say_what_is_logged()

    def say_what_is_logged(self) -> None:
        """See `ProcessLog`."""
        self.page.log_switches = switches()


def _spawned(program: Program, *passed: int) -> subprocess.Popen[bytes]:
    try:
        os.fstat(2)
        log: int = 2
    except OSError:
        log = subprocess.DEVNULL
    environment = program.environment
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
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}{' (is there too little memory?)' if name == 'SIGKILL' else ''}"
