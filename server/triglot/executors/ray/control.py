"""The `Control` of an actor: what a `ControlBlock` holds, sent as lines of JSON over a connection.

The server sends a line ten times a second, so an actor that receives none has lost its server.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from triglot.executors.process.notices import Notice, Outbox

SILENCE_SECONDS = 60
"""Seconds after which an actor that has received nothing ends."""
_KEPT = 4096
"""Number of cancelled calls that are remembered."""
_MAX_UNSENT = 1 << 20
"""Unsent bytes beyond which the server drops further messages."""
_SAMPLES = 50
"""Number of recent measurements of the clock offset, of which the smallest counts."""
CONTROL = "control"
"""Key of a notice that is a control message; the other notices are the model's metrics."""


class Recent:
    """The last `_KEPT` numbers that were added."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def add(self, number: int) -> None:
        """Add a number, and drop the oldest. On one thread at a time."""
        self._numbers[number] = None
        if len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]


class ServerControl:
    """The server's side; see `ControlBlock`. Sends nothing before it is attached.

    `take` receives the actor's other notices.
    """

    clock_offset = 0.0

    def __init__(self, take: Callable[[Notice], object]) -> None:
        self.beats = 0
        self._take = take
        self._log_switches = 0
        self.to_check = 0
        self._checked = 0
        self._ready = False
        self._cancelled = Recent()
        self._unsent = b""
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def attach(self, connection: socket.socket) -> int:
        """Send over this connection, and own it. Returns a duplicate of its file descriptor, to read from."""
        connection.setblocking(False)
        with self._lock:
            self._connection = connection
        return os.dup(connection.fileno())

    def close(self) -> None:
        """Close the connection; nothing more is sent."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def take(self, notice: Notice) -> None:
        """Handle a notice: a control message here, any other in the `take` of the constructor."""
        said: Mapping[str, Any] | None = notice.get(CONTROL)
        if said is None:
            self._take(notice)
            return
        self.beats = said.get("beats", self.beats)
        if "checked" in said:
            self._checked, self._ready = said["checked"]

    def _say(self, said: Mapping[str, Any]) -> None:
        line = json.dumps(said).encode() + b"\n"
        with self._lock:
            if self._connection is None or len(self._unsent) > _MAX_UNSENT:
                return
            self._unsent += line
            try:
                sent = self._connection.send(self._unsent)
            except OSError:  # The send buffer is full; or the connection is closed, which the reader notices.
                return
            self._unsent = self._unsent[sent:]

    def beat(self) -> None:
        """Does nothing: only the actor sends heartbeats."""

    @property
    def log_switches(self) -> int:
        """See `ControlBlock`."""
        return self._log_switches

    @log_switches.setter
    def log_switches(self, switches: int) -> None:
        # Set with each check of the process, so this also serves as the server's heartbeat, and carries its clock.
        self._log_switches = switches
        self._say({"log": switches, "check": self.to_check, "now": time.monotonic()})

    def begin_check(self) -> int:
        """See `ControlBlock`."""
        with self._lock:
            self.to_check += 1
            return self.to_check

    def end_check(self, number: int, ready: bool) -> None:
        """Does nothing: only the actor ends checks."""

    def checked(self, number: int) -> bool | None:
        """See `ControlBlock`."""
        return self._ready if self._checked == number else None

    def is_cancelled(self, call: int) -> bool:
        """See `ControlBlock`."""
        return call in self._cancelled

    def cancel(self, call: int) -> None:
        """See `ControlBlock`."""
        if call not in self._cancelled:
            self._cancelled.add(call)
            self._say({"cancel": call})


class ActorControl:
    """The actor's side; see `ControlBlock`. A thread of its own reads.

    `end` is called on that thread once the server has disconnected, or was silent for `SILENCE_SECONDS`.
    """

    def __init__(self, connection: socket.socket, end: Callable[[], object]) -> None:
        self._end = end
        seconds = struct.pack("ll", SILENCE_SECONDS, 0)  # Limits only receiving, unlike `settimeout`.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self.outbox = Outbox(connection.fileno())
        self.beats = 0
        self.clock_offset = 0.0
        self.log_switches = 0
        self.to_check = 0
        self._cancelled = Recent()
        self._offsets: deque[float] = deque(maxlen=_SAMPLES)
        self._connection = connection
        threading.Thread(target=self._read, name="control", daemon=True).start()

    def _read(self) -> None:
        try:
            rest = b""
            while data := self._connection.recv(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._took(json.loads(line))
        except (OSError, ValueError):
            pass  # Disconnected or silent for too long, or not our server's JSON.
        self._end()

    def _took(self, said: Mapping[str, Any]) -> None:
        if "cancel" in said:
            self._cancelled.add(said["cancel"])
            return
        # A message's delay adds to its offset, so the smallest one is the most exact.
        self._offsets.append(time.monotonic() - said["now"])
        self.clock_offset = min(self._offsets)
        self.log_switches = said["log"]
        self.to_check = said["check"]

    def _say(self, said: Mapping[str, Any]) -> None:
        self.outbox.put({CONTROL: said})

    def beat(self) -> None:
        """See `ControlBlock`."""
        self.beats += 1
        self._say({"beats": self.beats})

    def begin_check(self) -> int:
        """Returns the last check's number: only the server begins checks."""
        return self.to_check

    def end_check(self, number: int, ready: bool) -> None:
        """See `ControlBlock`."""
        self._say({"checked": [number, ready]})

    def checked(self, number: int) -> bool | None:
        """Returns None: only the server reads results of checks."""
        return None

    def is_cancelled(self, call: int) -> bool:
        """See `ControlBlock`."""
        return call in self._cancelled

    def cancel(self, call: int) -> None:
        """Does nothing: only the server cancels calls."""
