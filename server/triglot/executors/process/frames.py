"""The frames that the server and a process exchange over a socket, and their encoding.

A frame is a length and a head of fixed size, then the numbers of the regions that its sender no longer reads, the
places of its tensors in a region, and a JSON text. All numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from triglot.core.tensor import DATATYPES

LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BBHHIQQI")
_PLACE = struct.Struct("<HBBQQ")
_NAMES = tuple(DATATYPES)
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}
_HAS_TENSORS = 1
MAX_FRAME = 2**31
"""Limit on the bytes of a frame; a longer one is invalid."""


class Kind(enum.IntEnum):
    """The kinds of frames: the server sends those below 16, a process the others.

    Where a model calls another model, the sides are swapped: the server sends ANSWER, and the process GO_ON and
    STOP.
    """

    LOAD = 1
    """Load this model."""
    CALL = 2
    """Run `infer`, or `infer_batch`, on these inputs."""
    GO_ON = 3
    """The response was taken, send the next one."""
    STOP = 4
    """No more responses are needed."""
    REPLY = 5
    """The reply to a question."""
    REFUSAL = 6
    """The error of a question."""
    END = 7
    """Close the model and end."""
    START = 8
    """Run `start_instance`."""
    RECEIVED = 9
    """The outcome of this call has arrived."""

    LOADED = 16
    """The model is loaded; these are its declared attributes."""
    UNLOADABLE = 17
    """The model cannot be loaded, or its instance cannot be started."""
    ANSWER = 18
    """One response of a stream; the server replies GO_ON or STOP to each."""
    FINISHED = 19
    """End of the stream; `infer` still runs."""
    DONE = 20
    """The code has returned this."""
    FAILED = 21
    """The code has raised this."""
    METADATA = 22
    """Question: the request's metadata."""
    MODEL = 23
    """Question: run a `ModelCall` or a `ModelTask`."""


OUTCOMES = (Kind.DONE, Kind.FAILED, Kind.UNLOADABLE)
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
    released: tuple[int, ...] = ()


def pack(frame: Frame) -> bytes:
    """Returns the frame as bytes, its length first. Raises `FrameError` for one that is too long."""
    places = frame.places or ()
    parts = [b"", b""]
    if frame.released:
        parts.append(struct.pack(f"<{len(frame.released)}I", *frame.released))
    for place in places:
        name, dims = place.name.encode(errors="surrogatepass"), len(place.shape)
        if len(name) > 0xFFFF or dims > 0xFF:
            raise FrameError(f"a tensor's name of {len(name)} bytes, or {dims} dims, are too many")
        parts.append(_PLACE.pack(len(name), _NUMBERS[place.datatype], dims, place.offset, place.size))
        if dims:
            parts.append(struct.pack(f"<{dims}Q", *place.shape))
        parts.append(name)
    parts.append(frame.text)
    if len(places) > 0xFFFF or len(frame.released) > 0xFFFF:
        raise FrameError(f"{len(places)} tensors, {len(frame.released)} regions: expected at most 65535")
    parts[1] = _HEAD.pack(
        frame.kind,
        _HAS_TENSORS * (frame.places is not None),
        len(places),
        len(frame.released),
        frame.region,
        frame.region_size,
        frame.call,
        len(frame.text),
    )
    length = sum(map(len, parts))
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes: expected at most {MAX_FRAME}")
    parts[0] = LENGTH.pack(length)
    return b"".join(parts)


def unpack(data: bytes | bytearray | memoryview) -> Frame:
    """Returns the frame of these bytes, which lack the length. Raises `FrameError` for invalid ones."""
    try:
        return _unpack(memoryview(data))
    except (struct.error, IndexError, ValueError) as error:
        raise FrameError(f"no frame: {error}") from error


def _unpack(data: memoryview) -> Frame:
    kind, flags, places, regions, region, region_size, call, text = _HEAD.unpack_from(data)
    at = _HEAD.size
    released = struct.unpack_from(f"<{regions}I", data, at) if regions else ()
    at += 4 * regions
    found = []
    for _ in range(places):
        place, at = _place(data, at)
        found.append(place)
    if len(data) != at + text:
        raise FrameError(f"expected {at + text} bytes, got {len(data)}")
    tensors = tuple(found) if flags & _HAS_TENSORS else None
    if (known := _KINDS.get(kind)) is None:
        raise FrameError(f"there are no frames of kind {kind}")
    return Frame(known, call, bytes(data[at:]), tensors, region, region_size, released)


def _place(data: memoryview, at: int) -> tuple[Place, int]:
    name, datatype, dims, offset, size = _PLACE.unpack_from(data, at)
    at += _PLACE.size
    shape = struct.unpack_from(f"<{dims}Q", data, at) if dims else ()
    at += 8 * dims
    if at + name > len(data):
        raise FrameError("a tensor's name is cut off")
    text = bytes(data[at : at + name]).decode(errors="surrogatepass")
    return Place(text, _NAMES[datatype], shape, offset, size), at + name


class FrameReader:
    """Splits the received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Add received bytes; returns the frames that are now complete. Raises `FrameError`."""
        if data and not self._data and _end(data) == len(data):
            return [unpack(memoryview(data)[LENGTH.size :])]  # The usual case, without a copy.
        self._data += data
        frames = []
        while (end := _end(self._data)) and len(self._data) >= end:
            frames.append(unpack(bytes(self._data[LENGTH.size : end])))
            del self._data[:end]
        return frames


def _end(data: bytes | bytearray) -> int:
    """Returns the end of the first frame, 0 until its length has arrived. Raises `FrameError` for a long one."""
    if len(data) < LENGTH.size:
        return 0
    (length,) = LENGTH.unpack_from(data)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes: expected at most {MAX_FRAME}")
    return LENGTH.size + int(length)
