"""One end of the pipe between the server and a process: frames over a socket, tensors beside it.

Strategy: a core that has to be woken takes as long as a small call to a process, and who wakes it pays for that,
too. So a process that has just been asked again stays awake for a while after its answer. The server does not: its
threads would hold the interpreter's lock.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from triglot.core.tensor import Array
from triglot.executors.process.arena import Arena, Placed, Row, packed
from triglot.executors.process.frames import Frame, FrameError, FrameReader, Kind, Place, pack
from triglot.executors.process.mirror import Mirror
from triglot.executors.process.views import Named

_CHUNK = 64 * 1024
_DESCRIPTOR = array.array("i", [0]).itemsize
_SPACE = socket.CMSG_SPACE(_DESCRIPTOR) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
SOON = 400e-6
"""Seconds: what took longer the last time is not waited for awake; 1 MiB is placed by its sender in that time."""


class Gone(Exception):
    """The other side is not there any more."""


class NotSent(Gone):
    """The other side was gone before it could get the whole frame."""


class Message(NamedTuple):
    """A frame as it came. `named` tensors lie over a region; None: the frame has none."""

    kind: Kind
    call: int
    text: bytes
    named: Named | None

    @property
    def tensors(self) -> dict[str, Array] | None:
        """The tensors by name."""
        return None if self.named is None else dict(self.named)

    @property
    def fields(self) -> Any:
        """What its JSON says, None where there is none."""
        return json.loads(self.text) if self.text else None


class Channel:
    """Blocks; any thread may send, one at a time receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.wakeful = False
        """Whether to wait awake for what is likely to come soon."""
        self.arena = Arena()
        self._mirror = Mirror()
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._descriptors: deque[int] = deque()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._soon = False

    def place(self, tensors: Mapping[Any, Any]) -> Placed:
        """The tensors can be forgotten, and sent. Raises as `packed`, and `OSError`."""
        return self.place_all(packed(tensors))

    def place_all(self, rows: Iterable[Row]) -> Placed:
        """As `place`; several may have the same name. Raises `MemoryError` and `OSError`."""
        return self.arena.place(rows)

    def send(self, kind: Kind, *, call: int = 0, text: bytes = b"", placed: Placed | None = None) -> None:
        """Raises `NotSent`, and `FrameError` for too much."""
        descriptor = None if placed is None else placed.descriptor
        try:
            with self._sending:
                self._send(self._packed(kind, call, text, placed), descriptor)
        except OSError as error:
            raise NotSent(str(error)) from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _packed(self, kind: Kind, call: int, text: bytes, placed: Placed | None) -> bytes:
        places, region, size = None, 0, 0
        if placed is not None:
            places, region, size = placed.places, placed.region, placed.region_size
        released = self._mirror.released()
        try:
            return pack(Frame(kind, call, text, places, region, size, released))
        except FrameError:
            self.arena.forget(region)
            self._mirror.tell_again(released)
            raise

    def _send(self, data: bytes, descriptor: int | None) -> None:
        if descriptor is None:
            self.socket.sendall(data)
        else:
            sent = socket.send_fds(self.socket, [data], [descriptor])
            if sent < len(data):
                self.socket.sendall(memoryview(data)[sent:])

    def receive(self) -> Message:
        """The next message, waiting for it. Raises `Gone`, also for what is none."""
        try:
            while not self._frames:
                self._fill()
            frame = self._frames.popleft()
            named = None if frame.places is None else self._tensors(frame, frame.places)
            if frame.released:
                self.arena.release(frame.released)
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error
        return Message(frame.kind, frame.call, frame.text, named)

    def _tensors(self, frame: Frame, places: tuple[Place, ...]) -> Named:
        """Raises `FrameError`, `ValueError` and `OSError`."""
        if frame.region_size:
            if not self._descriptors:
                raise FrameError(f"region {frame.region} came without its file descriptor")
            self._mirror.adopt(frame.region, frame.region_size, self._descriptors.popleft())
        return self._mirror.tensors(frame.region, places)

    def _fill(self) -> None:
        until = time.monotonic() + SOON
        if self.wakeful and self._soon:
            while not self._poll.poll(0) and time.monotonic() < until:
                os.sched_yield()  # It gives way to whoever has something to do on this core.
        data, ancillary, _, _ = self.socket.recvmsg(_CHUNK, _SPACE, _CLOSE_ON_EXEC)
        self._soon = time.monotonic() < until
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _DESCRIPTOR
                self._descriptors.extend(array.array("i", content[:whole]))
        if not data:
            raise Gone("the connection was closed")
        self._frames.extend(self._reader.feed(data))

    def trim(self, now: float) -> None:
        """Give back memory that has not been used for a while."""
        self.arena.trim(now)

    def close(self) -> None:
        """Nothing is sent or received any more; not while another thread does."""
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
