"""The server's end of one process of a model: started, greeted, called, and ended."""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code, MissingDependency, ModelLoadError, Unavailable
from triglot.core.model_config import ModelConfig
from triglot.engine.processes.channel import Channel, Gone, Message, NotSent
from triglot.engine.processes.conversation import call_fields
from triglot.engine.processes.desk import Desk
from triglot.engine.processes.failures import error_of
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.health import Pulse
from triglot.engine.processes.page import Page
from triglot.engine.processes.values import dumps, loads
from triglot.engine.work import Inputs

_PROGRAM = "import sys; sys.path[:] = {path!r}; from triglot.engine.processes.child import main; main()"
_STATUS_SECONDS = 1.0
"""How long the status of a process that hung up may take."""


class NotBegun(Exception):
    """The process had ended before the call reached it."""


class ModelFailure(Exception):
    """What a model's code has raised in its process; the trace there is its cause."""


class ModelTrace(Exception):
    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class Program:
    """What a process is to load: `load` is the import path of a function of backend, file and configuration."""

    name: str
    load: str
    backend: str
    file: Path
    config: ModelConfig = field(repr=False)


class Process:
    """One process. One thread at a time calls it; any thread may `kill` it.

    `number` is its own among the instances of its model. `lost` says why it cannot be called any more.
    """

    def __init__(
        self, name: str, number: int, popen: subprocess.Popen[bytes], channel: Channel, page: Page
    ) -> None:
        self.name = name
        self.number = number
        self.lost = ""
        self.busy = False
        self.hung = False
        self.pulse = Pulse(page, popen.pid)
        self._popen = popen
        self._channel = channel
        self._page = page
        self._numbers = itertools.count(1)
        self._current: tuple[int, Call] | None = None
        self._runs_since = math.inf
        self._with_call = True
        self._killing = threading.Lock()

    @classmethod
    def start(cls, name: str, number: int) -> Process:
        """A new one, which waits for `load`. It ends with the thread that calls this. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                page, descriptor = Page.make()
                try:
                    popen = _spawned(name, theirs.fileno(), descriptor)
                finally:
                    os.close(descriptor)
        except BaseException:
            ours.close()
            raise
        return cls(name, number, popen, Channel(ours), page)

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
            "log": _log_settings(),
        }
        try:
            self._channel.send(Kind.LOAD, text=dumps(setup))
            message = self._channel.receive()
        except Gone:
            raise ModelLoadError(
                f"{program.file}: its process {self._why_gone()} while it loaded the model; what it wrote before "
                "is in the server's log"
            ) from None
        fields = loads(message.text)
        if message.kind is Kind.LOADED:
            self._with_call = fields["takes_call"]
            declared: dict[str, Any] = fields
            return declared
        kind = MissingDependency if fields["missing"] else ModelLoadError
        raise kind(fields["message"], Code(fields.get("code", Code.UNKNOWN))) from _cause(fields)

    # --- calls ---

    def run(self, inputs: Inputs, call: Call) -> Any:
        """What `infer` returns; what it gives to `call.respond` before goes there.

        Raises `NotBegun`, `Unavailable` when the process ends or hangs meanwhile, and what the model raises.
        """
        with self._conversation(inputs, call) as desk:
            while (message := self._next(desk)).kind in (Kind.ANSWER, Kind.FINISHED):
                if message.kind is Kind.FINISHED:
                    call.finish()
                else:
                    answer = message.tensors
                    del message
                    self._go_on(Kind.GO_ON if call.respond(answer) else Kind.STOP)
                    del answer
            return self._result(message)

    def stream(self, inputs: Inputs, call: Call) -> Generator[Any, None, None]:
        """The answers that `infer` yields. Raises as `run`; closing the generator closes the model's."""
        with self._conversation(inputs, call) as desk:
            del inputs
            while (message := self._next(desk)).kind is Kind.ANSWER:
                answer = message.tensors
                del message
                self._runs_since = math.inf  # It waits for the reader.
                try:
                    yield answer
                except GeneratorExit:
                    del answer
                    self._stop(desk)
                    raise
                del answer
                self._go_on(Kind.GO_ON)
            self._result(message)

    def _stop(self, desk: Desk) -> None:
        """Have the model's generator closed, and wait for that."""
        self._go_on(Kind.STOP)
        while (message := self._next(desk)).kind is Kind.ANSWER:
            self._channel.send(Kind.STOP)
        self._result(message)

    def _go_on(self, kind: Kind) -> None:
        """Have the model run on after an answer."""
        self._runs_since = time.monotonic()
        self._channel.send(kind)

    @contextmanager
    def _conversation(self, inputs: Inputs, call: Call) -> Iterator[Desk]:
        self._begin(inputs, call)
        desk = Desk(self._channel, call)
        try:
            yield desk
        except (Gone, FrameError):
            self.lost = self.lost or self._why_gone()
            raise Unavailable(f"{self.name}: the process that ran the request {self.lost}") from None
        finally:
            if self._current is not None and not self.lost:
                self.kill("was left alone with a call")
            self._current, self._runs_since = None, math.inf
            desk.close()

    def _result(self, message: Message) -> Any:
        """What the model's code has returned. Raises what that has raised."""
        if message.kind not in (Kind.DONE, Kind.FAILED):
            raise Gone(f"unexpected {message.kind.name}")
        self._current, self._runs_since = None, math.inf
        if message.kind is Kind.DONE:
            return message.tensors
        fields = loads(message.text)
        raise _cause(fields) or error_of(fields)

    def _begin(self, inputs: Inputs, call: Call) -> None:
        number = next(self._numbers)
        text = dumps(call_fields(call)) if self._with_call else b""
        placed = self._channel.place(inputs)
        try:
            self._channel.send(Kind.CALL, call=number, text=text, placed=placed)
        except NotSent:
            self.lost = self.lost or self._why_gone()
            raise NotBegun(self.lost) from None
        self._current, self._runs_since = (number, call), time.monotonic()

    def _next(self, desk: Desk) -> Message:
        """The next message that is no question. Raises `Gone`."""
        while True:
            message = self._channel.receive()
            if self._current is not None and message.call != self._current[0]:
                self.kill("answered another call and was killed")
                raise Gone(self.lost)
            if not desk.serve(message):
                return message

    @property
    def run_seconds(self) -> float:
        """For how long it runs a call, of a stream since its last answer was taken; 0 while it runs none."""
        return max(0.0, time.monotonic() - self._runs_since)

    def tell_cancelled(self) -> None:
        """Have the model see it when its call is cancelled."""
        current = self._current
        if current is not None and current[1].cancelled:
            self._page.cancel(current[0])

    # --- its end ---

    def _why_gone(self) -> str:
        """Why it hung up."""
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
                self._channel.socket.shutdown(socket.SHUT_RDWR)

    def ask_to_end(self) -> None:
        """Have it close its model and end; nobody calls it any more."""
        self.lost = self.lost or "was asked to end"
        with suppress(Gone, FrameError):
            self._channel.send(Kind.END)

    def end(self, patience: float, more_patience: float) -> None:
        """Wait for its end; after `patience` it is told by SIGTERM, and `more_patience` later by SIGKILL."""
        for wait, tell in ((patience, self._popen.terminate), (more_patience, self._popen.kill)):
            try:
                self._popen.wait(wait)
                break
            except subprocess.TimeoutExpired:
                tell()
        self._popen.wait()
        self._channel.close()

    def forget(self) -> bool:
        """Give back what belongs to it if it has ended and nobody calls it; whether it is so."""
        if self.busy or self._popen.poll() is None:
            return False
        self._channel.close()
        return True

    def trim(self) -> None:
        """Give back memory that has not been used for a while."""
        self._channel.arena.trim(time.monotonic())


def _spawned(name: str, end: int, page: int) -> subprocess.Popen[bytes]:
    try:
        os.fstat(2)
        log: int = 2
    except OSError:
        log = subprocess.DEVNULL
    program = _PROGRAM.format(path=[str(path) for path in sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", program, str(end), str(page), str(os.getpid()), name],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(end, page),
        # The server says when it ends, not the terminal.
        start_new_session=True,
    )


def _log_settings() -> dict[str, Any]:
    root = logging.getLogger()
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler and handler.formatter is not None:
            formatter = handler.formatter
            return {"level": root.level, "format": formatter._fmt, "dates": formatter.datefmt}
    return {}


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}{' (is there too little memory?)' if name == 'SIGKILL' else ''}"


def _cause(fields: Mapping[str, Any]) -> Exception | None:
    """What the model's code has raised, by its own name; None where that was an error for the client."""
    if "kind" not in fields:
        return None
    failure: Exception = type(fields["kind"], (ModelFailure,), {})(fields["text"])
    failure.__cause__ = ModelTrace(fields["trace"])
    return failure
