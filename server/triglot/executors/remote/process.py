"""`Process`, the server's side of one process of a model: its connection, its calls, its checks and its end."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from triglot.core.errors import ModelLoadError, Unavailable
from triglot.executors.remote.calls import Calls, NotBegun
from triglot.executors.remote.channel import BEAT_SECONDS, Channel, run_blocking
from triglot.executors.remote.frames import Kind
from triglot.executors.remote.logs import Switches, log_setup, switches
from triglot.executors.remote.place import Body, Program
from triglot.executors.remote.values import dumps
from triglot.platform.cpus import cpu_seconds, has_something_to_do

MIN_SILENCE = 10.0
"""Minimum seconds without a heartbeat before a process on another machine counts as hung.

The network may be interrupted, and the server cannot see whether the process uses its processor.
"""
_COMPUTING = 0.05
"""Share of one CPU above which a process computes; threads that wait for the GIL, and poll it, use less."""


class Heartbeat:
    """The server's view of one process's heartbeat; `check` is called periodically. Any frame counts as one.

    A thread of the process's interpreter beats, so the heartbeat stops with the interpreter: when the process is
    stopped, when it is deadlocked, and while the model's code holds the GIL. Code that does so mostly computes.
    """

    def __init__(self, channel: Channel, pid: int | None) -> None:
        self._channel = channel
        self._pid = pid
        """Process id; None for a process on another machine, of which only the heartbeats can be observed."""
        self._received_count = 0
        self._computed = 0.0 if pid is None else cpu_seconds(pid)
        self._looked = time.monotonic()
        self.silence = 0.0
        """Seconds without a heartbeat or other activity, as far as checks were made."""

    def check(self) -> None:
        """Update `silence`."""
        now = time.monotonic()
        # A long time between checks does not count in full: the whole machine may have been stopped.
        elapsed = min(now - self._looked, 2 * BEAT_SECONDS)
        self._looked = now
        received_count = self._channel.received_count
        if received_count != self._received_count:
            self._received_count, self.silence = received_count, 0.0
        elif self._channel.has_unread() or self._works(elapsed):
            self.silence = 0.0
        else:
            self.silence += elapsed

    def _works(self, elapsed: float) -> bool:
        if self._pid is None:
            return False
        before, self._computed = self._computed, cpu_seconds(self._pid)
        return self._computed - before > _COMPUTING * elapsed or has_something_to_do(self._pid)


class Process:
    """One process, owned by a `Pool`. `kill` may be called on any thread.

    `number` is the instance's, from 0. `take_metrics` gets each change of its model's metrics, on any thread.
    `reserved` is the number of calls that it is reserved for, at most `capacity`. `started`: whether
    `start_instance` was requested of it. `lost` is the reason why it takes no more calls, "" while it does;
    `hung`: it was killed as hung.
    """

    def __init__(self, program: Program, number: int, body: Body, take_metrics: Callable[[Any], object]) -> None:
        self.program = program
        self.number = number
        self.body = body
        self.lost = ""
        self.reserved = 0
        self.capacity: float = 1
        self.started = False
        self.hung = False
        self._take_metrics = take_metrics
        self._use(socket.socket())  # Until `load` connects it.
        self._reader: threading.Thread | None = None
        self._switches: Switches = {}
        self._killing = threading.Lock()

    def _use(self, connection: socket.socket) -> None:
        """Reach the process over this connection."""
        remote = self.body.remote
        self.channel = Channel(connection, shares_memory=not remote)
        self.calls = Calls(self.program, self.channel, self.kill, self._why_lost, self._take_metrics)
        self.heartbeat = Heartbeat(self.channel, None if remote else self.body.pid)

    def __str__(self) -> str:
        return f"{self.program.name}: {self.program.kind} {self.number} ({self.body.where})"

    # --- load ---

    def load(self, loop: Callable[[], asyncio.AbstractEventLoop | None]) -> dict[str, Any]:
        """Connect to it, and load the model; returns what that declares. `loop` returns the server's event loop.

        Blocks. Raise `ModelLoadError`.
        """
        program = self.program
        connection = self.body.connect()
        self.channel.close()
        self._use(connection)
        if self.lost:  # Killed meanwhile.
            self.kill(self.lost)
        log = log_setup(remote=self.body.remote)
        file = program.file.absolute()
        if moved := self.body.moved:
            file = moved[1] / file.relative_to(moved[0])
        setup = {
            "name": program.name,
            "kind": program.kind,
            "instance": self.number,
            "load": program.load,
            "backend": program.backend,
            "file": file,
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
                f"{program.file}: its {program.kind} {self.lost} while it loaded the model; the server's log has "
                "its output"
            ) from None
        except ModelLoadError as error:
            if moved is None:
                raise
            text = str(error).replace(str(moved[1]), str(moved[0]))
            raise type(error)(text, error.code) from error.__cause__
        calls.on_loop, calls.with_call, calls.log_ids = declared["on_loop"], declared["takes_call"], "json" in log
        # While one call runs on another machine, the next ones are sent already, and wait there.
        self.capacity = math.inf if calls.on_loop else program.ray.max_inflight if self.body.remote else 1
        if calls.on_loop or self.body.remote:
            name = f"{program.name} reads"
            self._reader = threading.Thread(target=self.channel.read_until_closed, name=name, daemon=True)
            self._reader.start()
        return declared

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
        if why := self.body.exit_reason():
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
        silence = self.heartbeat.silence
        if hang_seconds and silence >= max(hang_seconds, MIN_SILENCE if self.body.remote else 0.0):
            return f"sent no heartbeat for {silence:.1f} s and was killed"
        if 0 < longest_run < self.calls.run_seconds:
            return f"exceeded longest_run ({longest_run:g} s) and was killed"
        return ""

    def check_loading(self, timeout: float) -> None:
        """Check a process that loads its model, for at most `timeout` seconds."""
        begun = self.body.begun
        if why := self.body.exit_reason():
            self.kill(why)
        elif begun is not None and (age := time.monotonic() - begun) > timeout:
            self.kill(f"did not load its model within {age:.0f} s and was killed")
        else:
            self._switch_log()

    def _switch_log(self) -> None:
        """Pass changed log settings of the server to the process; see `ProcessLog`. A remote one hears from it."""
        if self.body.remote and not self.channel.congested:
            self.channel.send(Kind.BEAT)
        if (now := switches()) != self._switches:
            self._switches = now
            self.channel.send(Kind.LOG, text=dumps(now))

    # --- end ---

    def check_ready(self) -> bool:
        """Return whether its model's readiness check passes; False if the process ends meanwhile. Blocks."""
        try:
            return run_blocking(self.calls.check_ready())
        except (NotBegun, Unavailable):
            return False

    def _why_lost(self) -> str:
        """Return why a process that has closed its connection takes no more calls. Blocks."""
        if not self.lost:
            self.kill(self.body.why_closed())
        return self.lost

    def kill(self, why: str) -> None:
        """Kill it at once; its calls fail with the reason `why`. On any thread."""
        with self._killing:
            self.lost = self.lost or why
            with suppress(OSError):
                self.body.kill()
            self.channel.shut_down()

    def ask_to_end(self) -> None:
        """Ask it to close its model and end; it gets no more calls."""
        self.lost = self.lost or "was shut down"
        self.channel.send(Kind.END)

    def end(self, timeout: float, kill_timeout: float) -> None:
        """Wait until it has ended; it gets SIGTERM after `timeout` seconds, and SIGKILL `kill_timeout` later."""
        body = self.body
        if not self._wait(timeout):
            body.terminate()
            if not self._wait(kill_timeout):
                body.kill()
                body.wait(None)
        self._close()

    def _wait(self, timeout: float) -> bool:
        """Return whether it ends within `timeout` seconds; on another machine it has with its connection."""
        if not self.body.remote or self._reader is None:
            return self.body.wait(timeout)
        self._reader.join(timeout)
        return not self._reader.is_alive()

    def _close(self) -> None:
        """Close the connection of a process that has ended, and runs no calls."""
        self.channel.shut_down()
        if self._reader is not None:
            self._reader.join()
        self.channel.poll()  # What it has sent last.
        self.channel.close()

    def forget(self) -> bool:
        """Release its resources if it has ended, and runs no calls; returns False if that is not so yet."""
        if self.busy or not self.body.exit_reason():
            return False
        self._close()
        return True
