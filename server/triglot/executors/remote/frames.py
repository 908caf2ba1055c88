"""The frames that the server and a process exchange over a socket, and their encoding.

A frame is a head of fixed size, little-endian, then the places of its tensors with the regions that its sender no
longer reads, and its text. Both are JSON, or nothing.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

HEAD = struct.Struct("<IIBBQQQ")
MAX_FRAME = 2**31
"""Limit on the bytes of a frame; a longer one is invalid."""
FIRST_QUESTION = 2**63
"""First number of a process's questions, which are numbered apart from the server's calls."""
_CACHED = 1024
"""Largest size in bytes of places that are cached: those of most calls are as the last call's."""
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


class Kind(enum.IntEnum):
    """The kinds of frames: the server sends those below 16, a process those from 16, and both sides the last."""

    LOAD = 1
    """Load this model."""
    CALL = 2
    """Run `infer`, or `infer_batch`, on these inputs."""
    START = 3
    """Run `start_instance`."""
    CANCEL = 4
    """The call of this number, which may be a member, was cancelled."""
    CHECK = 5
    """Run the model's readiness check."""
    LOG = 6
    """Log at these levels from now on."""
    END = 7
    """Close the model and end."""

    FINISHED = 16
    """End of the stream; `infer` still runs."""
    QUESTION = 17
    """Run a `ModelCall` or a `ModelTask`, or return the request's metadata."""
    METRICS = 18
    """A change of the model's own metrics."""

    DONE = 32
    """Outcome of a call or a question: this was returned."""
    FAILED = 33
    """Outcome of a call or a question: this was raised."""
    ANSWER = 36
    """One response of a stream; the receiver replies GO_ON or STOP to each."""
    GO_ON = 37
    """The response was taken, send the next one."""
    STOP = 38
    """No more responses are needed."""
    BEAT = 39
    """A heartbeat."""


OUTCOMES = (Kind.DONE, Kind.FAILED)
"""The last frame of a call."""


class FrameError(ValueError):
    """A frame that is invalid or cannot be encoded."""


class Place(NamedTuple):
    """Place of a tensor in its frame's region: offset and size in bytes. A BYTES tensor is packed (spec 2.1)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    size: int


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One frame.

    `call` is the number of the call or question that it belongs to, and `text` is JSON or empty. `places` are the
    places of its tensors, None in a frame without tensors, empty for an empty dict of them; they lie in the region
    with the number `region`, 0 if they have no bytes. `region_size` is the size in bytes of a new region, whose
    file descriptor accompanies the frame, else 0. `released` are the regions of the other side that the sender no
    longer reads.
    """

    kind: Kind
    call: int = 0
    text: bytes = b""
    places: tuple[Place, ...] | None = None
    region: int = 0
    region_size: int = 0
    released: Sequence[int] = ()


def pack(frame: Frame) -> bytes:
    """Return the frame as bytes. Raise `FrameError` for one that is too long."""
    kind, call, text, places, region, region_size, released = frame
    lists = _packed(places, tuple(released)) if places or released else b""
    if len(lists) + len(text) > MAX_FRAME:
        raise FrameError(f"a frame of {len(lists) + len(text)} bytes: expected at most {MAX_FRAME}")
    has_tensors = places is not None
    return HEAD.pack(len(lists), len(text), kind, has_tensors, call, region, region_size) + lists + text


@lru_cache(64)
def _packed(places: tuple[Place, ...] | None, released: tuple[int, ...]) -> bytes:
    return _encode((places or (), released)).encode()


def _parsed(lists: bytes) -> tuple[tuple[Place, ...], tuple[int, ...]]:
    places, released = _decode(lists.decode())
    return (
        tuple(Place(name, datatype, tuple(shape), offset, size) for name, datatype, shape, offset, size in places),
        tuple(released),
    )


_parsed_before = lru_cache(64)(_parsed)


class FrameReader:
    """Splits the received bytes into frames, and the bytes that follow these."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data = self._data + data if self._data else data

    @property
    def complete(self) -> bool:
        """Whether the next frame has been received."""
        data = self._data
        return len(data) >= HEAD.size and len(data) >= HEAD.size + sum(HEAD.unpack_from(data)[:2])

    def next(self) -> Frame | None:
        """Return the next frame; None if it is not complete. Raise `FrameError` for an invalid one."""
        data = self._data
        if len(data) < HEAD.size:
            return None
        size, text_size, kind, has_tensors, call, region, region_size = HEAD.unpack_from(data)
        if size + text_size > MAX_FRAME:
            raise FrameError(f"a frame of {size + text_size} bytes: expected at most {MAX_FRAME}")
        middle = HEAD.size + size
        end = middle + text_size
        if len(data) < end:
            return None
        lists, text, self._data = data[HEAD.size : middle], data[middle:end], data[end:]
        try:
            places, released = (_parsed_before if size <= _CACHED else _parsed)(lists) if lists else ((), ())
            return Frame(_KINDS[kind], call, text, places if has_tensors else None, region, region_size, released)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise FrameError(f"no frame: {error}") from error

    def take(self, view: memoryview) -> int:
        """Move received bytes that follow the last frame into `view`; returns their number."""
        count = min(len(view), len(self._data))
        view[:count], self._data = self._data[:count], self._data[count:]
        return count
