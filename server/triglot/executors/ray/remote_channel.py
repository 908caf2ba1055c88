"""A channel between machines: a frame's tensors follow it on the same connection."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterable
from typing import Any

import numpy as np

from triglot.core.tensor import DATATYPES
from triglot.executors.joining import Stack
from triglot.executors.process.channel import Channel, Gone, Message
from triglot.executors.process.frames import HEAD, Frame, Head, Place
from triglot.executors.process.shared_memory import ALIGNMENT, MAX_BYTES, Placed, Row, array_at

_BUFFER = 64 * 1024
_NOTHING = np.frombuffer(b"", np.uint8)
_PADDING = bytes(ALIGNMENT)
_BEHIND = 1
"""Region number of tensors that follow their frame."""


class RemoteChannel(Channel):
    """The `Channel` of an actor, over a TCP connection. Blocks; any thread may send, one at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._file = io.BufferedReader(end.makefile("rb", buffering=0), _BUFFER)

    def place_all(self, rows: Iterable[Row]) -> Placed:
        """See `Channel`. Arrays are not copied if they are contiguous: they are read while they are sent."""
        places: list[Place] = []
        parts: list[Any] = []
        end = 0
        for name, datatype, shape, data in rows:
            part = data if isinstance(data, bytes) else _bytes_of(data, datatype)
            if gap := -end % ALIGNMENT:
                parts.append(_PADDING[:gap])
            start = end + gap
            places.append(Place(name, datatype, shape, start, len(part)))
            if len(part):
                parts.append(part)
            end = start + len(part)
        if not end:
            return Placed(tuple(places))
        return Placed(tuple(places), _BEHIND, end, None, parts)

    def receive(self) -> Message:
        """See `Channel`."""
        try:
            head = Head.of(self._bytes(HEAD.size))
            frame = head.frame(self._bytes(head.lists), self._bytes(head.text))
            named = None
            if frame.places is not None:
                named = self._behind(frame, frame.places)
        except (OSError, ValueError, TypeError, LookupError, OverflowError) as error:
            raise Gone(str(error)) from error
        return Message(frame.kind, frame.call, frame.text, named)

    def _behind(self, frame: Frame, places: tuple[Place, ...]) -> list[tuple[str, Any]]:
        """Return the tensors that follow the frame. Raises `OSError`, and `ValueError` for impossible sizes."""
        if not (size := frame.region_size):
            return [(place.name, array_at(_NOTHING, place)) for place in places]
        if size > MAX_BYTES or max(place.offset + place.size for place in places) > size:
            raise ValueError(f"tensors of {size} bytes")
        base = np.empty(size, np.uint8)
        self._fill_up(base.data)
        base.flags.writeable = False
        return [(place.name, array_at(base, place)) for place in places]

    def _fill_up(self, view: memoryview) -> None:
        while view:
            if not (count := self._file.readinto(view)):
                raise Gone("the connection was closed")
            self.heard += 1
            view = view[count:]

    def _bytes(self, size: int) -> bytes:
        data: bytes | None = self._file.read(size)
        if data is None or len(data) < size:
            raise Gone("the connection was closed")
        self.heard += 1
        return data

    def close(self) -> None:
        """See `Channel`."""
        self._file.close()
        super().close()


def _bytes_of(data: Any, datatype: str) -> Any:
    """Return the elements' bytes in C order, without a copy for a contiguous array of this dtype."""
    if isinstance(data, Stack):
        whole = np.empty(data.shape, DATATYPES[datatype].dtype)
        data.copy_to(whole)
        data = whole
    array = np.ascontiguousarray(data, DATATYPES[datatype].dtype)
    return array.reshape(-1).view(np.uint8)
