"""A channel between machines: a frame's tensors follow it on the same connection."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.tensor import DATATYPES
from triglot.executors.joining import Stack
from triglot.executors.process.arena import ALIGNMENT, MAX_BYTES, Placed, Row
from triglot.executors.process.channel import Channel, Gone, Message, NotSent
from triglot.executors.process.frames import LENGTH, MAX_FRAME, Frame, Kind, Place, pack, unpack
from triglot.executors.process.views import array_at, no_region

_BUFFER = 64 * 1024
_MAX_PARTS = 512
"""Buffers of one system call; the system allows 1024."""
_PADDING = bytes(ALIGNMENT)
_BEHIND = 1
"""Region number of tensors that follow their frame."""


@dataclass(slots=True)
class Carried(Placed):
    """Tensors that are sent after their frame. `parts` are their buffers, with padding, and keep them alive."""

    parts: Sequence[Any] = ()


class RemoteChannel(Channel):
    """The `Channel` of an actor, over a TCP connection. Blocks; any thread may send, one at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._sending_parts = threading.Lock()
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
        return Carried(tuple(places), _BEHIND, end, None, parts)

    def send(self, kind: Kind, *, call: int = 0, text: bytes = b"", placed: Placed | None = None) -> None:
        """See `Channel`."""
        parts: list[Any] = []
        places, region, size = None, 0, 0
        if placed is not None:
            places, region, size = placed.places, placed.region, placed.region_size
        if isinstance(placed, Carried):
            parts += placed.parts
        parts.insert(0, pack(Frame(kind, call, text, places, region, size)))
        try:
            with self._sending_parts:
                self._send_all(parts)
        except OSError as error:
            raise NotSent(str(error)) from error

    def _send_all(self, parts: list[Any]) -> None:
        left = [memoryview(part) for part in parts]
        at = 0
        while at < len(left):
            sent = self.socket.sendmsg(left[at : at + _MAX_PARTS])
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def receive(self) -> Message:
        """See `Channel`."""
        try:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            frame = unpack(self._read(length))
            named = None
            if frame.places is not None:
                named = self._behind(frame, frame.places)
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error
        return Message(frame.kind, frame.call, frame.text, named)

    def _behind(self, frame: Frame, places: tuple[Place, ...]) -> list[tuple[str, Any]]:
        """Returns the tensors that follow the frame. Raises `OSError`, and `ValueError` for impossible sizes."""
        if not (size := frame.region_size):
            return no_region(places)
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
            view = view[count:]

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise Gone("the connection was closed")
        return data

    def trim(self, now: float) -> None:
        """See `Channel`. Does nothing: no memory is kept."""

    def close(self) -> None:
        """See `Channel`."""
        self._file.close()
        super().close()


def _bytes_of(data: Any, datatype: str) -> Any:
    """Returns the elements' bytes in C order, without a copy for a contiguous array of this dtype."""
    if isinstance(data, Stack):
        whole = np.empty(data.shape, DATATYPES[datatype].dtype)
        data.copy_to(whole)
        data = whole
    array = np.ascontiguousarray(data, DATATYPES[datatype].dtype)
    return array.reshape(-1).view(np.uint8)
