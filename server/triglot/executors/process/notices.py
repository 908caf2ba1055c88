"""What a process tells the server at any time and waits for no reply to: JSON, a line each, through a pipe."""

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
"""Bytes that may wait to be read; the system may give less."""
_CHUNK = 64 * 1024
Notice = Mapping[str, Any]


class PoolMetrics(ModelMetrics):
    """What the processes of a model have reported of its metrics; `inboxes` gives what may have more."""

    def __init__(self, inboxes: Callable[[], Iterable[Inbox]]) -> None:
        super().__init__()
        self._inboxes = inboxes

    def collect(self) -> Iterator[Family]:
        """As of now."""
        for inbox in self._inboxes():
            inbox.read()
        return super().collect()


class Outbox:
    """In the process. Holds up who says more than the server reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def put(self, notice: Notice) -> None:
        """On any thread. Nothing where the server is gone."""
        data = memoryview(json.dumps(notice).encode() + b"\n")
        with self._lock, suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]


class Inbox:
    """In the server. Each notice is given to `take`, in their order."""

    def __init__(self, descriptor: int | None, take: Callable[[Notice], object]) -> None:
        self._descriptor: int | None = None
        self._take = take
        self._rest = b""
        self._lock = threading.Lock()
        self.ended = False
        """Whether nothing more can come."""
        if descriptor is not None:
            self.attach(descriptor)

    def attach(self, descriptor: int) -> None:
        """Read from here, where there was nothing to read from."""
        os.set_blocking(descriptor, False)
        with self._lock:
            self._descriptor = descriptor

    @classmethod
    def make(cls, take: Callable[[Notice], object]) -> tuple[Inbox, int]:
        """A new one, and the file descriptor of its other end. Raises `OSError`."""
        ours, theirs = os.pipe()
        with suppress(AttributeError, OSError):
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _ROOM)
        return cls(ours, take), theirs

    def read(self) -> None:
        """On any thread: whatever has come."""
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
        """Read what is left, and no more."""
        self.read()
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
