"""One end of the channel between the server and a process: frames over a socket, tensors in shared memory.

Strategy: to wake a sleeping core takes as long as a small call to a process, and costs the waking side time, too.
So a process whose last frame arrived soon busy-waits a while for the next one before it sleeps. The server does
not: its threads would hold the interpreter's lock.
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
"""Seconds of busy-waiting, unless the last frame took longer to arrive; in that time a sender can place 1 MiB."""


class Gone(Exception):
    """The other side has closed the channel, or has sent invalid bytes."""


class NotSent(Gone):
    """The other side was gone before the whole frame was sent."""


class Message(NamedTuple):
    """A received frame. `named` tensors may lie over a region of shared memory; None: the frame has none."""

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
        """The value of its JSON text; None without one."""
        return json.loads(self.text) if self.text else None


class Channel:
    """One end of the channel. Blocks; any thread may send, one at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.wakeful = False
        """Whether to busy-wait for a frame that is likely to arrive soon."""
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
        """Copy the tensors, named by their keys, for `send`. Raises as `packed`, and `OSError`."""
        return self.place_all(packed(tensors))

    def place_all(self, rows: Iterable[Row]) -> Placed:
        """As `place`; several tensors may have the same name. Raises `MemoryError` and `OSError`."""
        return self.arena.place(rows)

    def send(self, kind: Kind, *, call: int = 0, text: bytes = b"", placed: Placed | None = None) -> None:
        """Send a frame of the call, or question, of this number. `text`: JSON, or nothing.

        Raises `NotSent` when the other side is gone, and `FrameError` for a frame that is too long.
        """
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
        """Returns the next message, waiting for it. Raises `Gone`, also for bytes that are not a valid frame."""
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
        """Returns the frame's tensors; maps its region if it is new. Raises `ValueError` and `OSError`."""
        if frame.region_size:
            if not self._descriptors:
                raise FrameError(f"region {frame.region} came without its file descriptor")
            self._mirror.adopt(frame.region, frame.region_size, self._descriptors.popleft())
        return self._mirror.tensors(frame.region, places)

    def _fill(self) -> None:
        until = time.monotonic() + SOON
        if self.wakeful and self._soon:
            while not self._poll.poll(0) and time.monotonic() < until:
                os.sched_yield()  # Other threads that are ready to run on this core run first.
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
        """Return unused memory to the system. `now` is in seconds of `time.monotonic`."""
        self.arena.trim(now)

    def close(self) -> None:
        """Close it. No thread may be sending or receiving."""
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
