"""One end of the conversation between the server and a process: frames over a socket, tensors beside it."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triglot.core.tensor import Array
from triglot.engine.processes.arena import Arena, Mirror, Placed
from triglot.engine.processes.frames import Frame, FrameError, FrameReader, Kind, pack

_CHUNK = 64 * 1024
_DESCRIPTOR = array.array("i", [0]).itemsize
_SPACE = socket.CMSG_SPACE(_DESCRIPTOR) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Gone(Exception):
    """The other side is not there any more."""


class NotSent(Gone):
    """The other side was gone before it could get the whole frame."""


@dataclass(frozen=True, slots=True)
class Message:
    """A frame as it came. `named` tensors lie over the other side's region; None: the frame has none."""

    kind: Kind
    call: int
    text: bytes
    named: list[tuple[str, Array]] | None

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
        self.arena = Arena()
        self._mirror = Mirror()
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._descriptors: deque[int] = deque()
        self._sending = threading.Lock()

    def place(self, tensors: Mapping[Any, Any]) -> Placed:
        """As `Arena.place`: the tensors can be forgotten, and sent."""
        return self.arena.place(tensors)

    def send(self, kind: Kind, *, call: int = 0, text: bytes = b"", placed: Placed | None = None) -> None:
        """Raises `NotSent`, and `FrameError` for too much."""
        places, region, size, descriptor = None, 0, 0, None
        if placed is not None:
            places, region = placed.places, placed.region
            size, descriptor = placed.region_size, placed.descriptor
        released = self._mirror.released()
        try:
            data = pack(Frame(kind, call, text, places, region, size, released))
            with self._sending:
                self._send(data, descriptor)
        except FrameError:
            self.arena.forget(region)
            self._mirror.tell_again(released)
            raise
        except OSError as error:
            raise NotSent(str(error)) from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

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
            self.arena.release(frame.released)
            if frame.region_size:
                if not self._descriptors:
                    raise FrameError(f"region {frame.region} came without its file descriptor")
                self._mirror.adopt(frame.region, frame.region_size, self._descriptors.popleft())
            named = None if frame.places is None else self._mirror.tensors(frame.region, frame.places)
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error
        return Message(frame.kind, frame.call, frame.text, named)

    def _fill(self) -> None:
        data, ancillary, _, _ = self.socket.recvmsg(_CHUNK, _SPACE, _CLOSE_ON_EXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _DESCRIPTOR
                self._descriptors.extend(array.array("i", content[:whole]))
        if not data:
            raise Gone("the connection was closed")
        self._frames.extend(self._reader.feed(data))

    def close(self) -> None:
        """Nothing is sent or received any more; not while another thread does."""
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
