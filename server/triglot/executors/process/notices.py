"""Notices, which a process sends at any time and which have no reply: lines of JSON in a pipe."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from triglot.model.metrics import Family, ModelMetrics

log = logging.getLogger(__name__)

_ROOM = 1024 * 1024
"""Requested size of the pipe's buffer in bytes; the system may grant less."""
_CHUNK = 64 * 1024
Notice = Mapping[str, Any]


class PoolMetrics(ModelMetrics):
    """The metrics that the processes of a model have reported. `inboxes` returns the processes' inboxes."""

    def __init__(self, inboxes: Callable[[], Iterable[Inbox]]) -> None:
        super().__init__()
        self._inboxes = inboxes

    def collect(self) -> Iterator[Family]:
        """Returns the families, after all notices that have arrived."""
        for inbox in self._inboxes():
            inbox.read()
        return super().collect()


class Outbox:
    """In the process: sends notices."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def put(self, notice: Notice) -> None:
        """Send a notice; blocks while the pipe is full. Does nothing if the server is gone. On any thread."""
        data = memoryview(json.dumps(notice).encode() + b"\n")
        with self._lock, suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]


class Inbox:
    """In the server: receives notices, and passes each to `take`, in order.

    It owns `descriptor`, the end of the pipe to read from; None: it is attached later.
    """

    def __init__(self, descriptor: int | None, take: Callable[[Notice], object]) -> None:
        self._descriptor: int | None = None
        self._take = take
        self._rest = b""
        self._lock = threading.Lock()
        self.ended = False
        """True once the other end is closed."""
        if descriptor is not None:
            self.attach(descriptor)

    def attach(self, descriptor: int) -> None:
        """Read from this descriptor from now on; there must have been none before."""
        os.set_blocking(descriptor, False)
        with self._lock:
            self._descriptor = descriptor

    @classmethod
    def make(cls, take: Callable[[Notice], object]) -> tuple[Inbox, int]:
        """Returns a new one, and the file descriptor of the pipe's other end. Raises `OSError`."""
        ours, theirs = os.pipe()
        with suppress(AttributeError, OSError):
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _ROOM)
        return cls(ours, take), theirs

    def read(self) -> None:
        """Handle the notices that have arrived. On any thread; does not block."""
        with self._lock:
            while self._descriptor is not None:
                try:
                    data = os.read(self._descriptor, _CHUNK)
                except BlockingIOError:
                    return
                except OSError:
                    data = b""
                if not data:
                    self.ended = True
                    return
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._took(line)

    def _took(self, line: bytes) -> None:
        try:
            self._take(json.loads(line))
        except (LookupError, TypeError, ValueError) as error:
            log.error("a process sent an invalid notice: %s", error)

    def close(self) -> None:
        """Handle the last notices, and close the descriptor."""
        self.read()
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
