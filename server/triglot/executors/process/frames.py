"""Frames: what goes over the socket between the server and a process, as bytes.

A frame is a length and a head of fixed size, then the numbers of the regions that its sender reads no more, where
its tensors lie, and a JSON text. All numbers are little-endian.
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
"""A longer one is not ours."""


class Kind(enum.IntEnum):
    """What a frame says; the first ones the server sends, the others a process."""

    LOAD = 1
    """Load this model."""
    CALL = 2
    """Run `infer` on these inputs."""
    GO_ON = 3
    """The answer was taken, and more are welcome."""
    STOP = 4
    """Nobody reads any more answers."""
    REPLY = 5
    """What was asked for."""
    REFUSAL = 6
    """What was asked for cannot be had."""
    END = 7
    """Close the model and end."""
    START = 8
    """Run `start_instance`."""

    LOADED = 16
    """The model is loaded, and declares this."""
    UNLOADABLE = 17
    """The model cannot be loaded."""
    ANSWER = 18
    """One answer of several; the server says GO_ON or STOP to each."""
    FINISHED = 19
    """No more answers come; `infer` still runs."""
    DONE = 20
    """`infer` has ended, and gave this."""
    FAILED = 21
    """`infer` has raised this."""
    METADATA = 22
    """Asks for the call's metadata."""
    MODEL = 23
    """Asks for another model's answer."""


class FrameError(ValueError):
    """Bytes that are no frame."""


class Place(NamedTuple):
    """Where a tensor lies in its frame's region; a BYTES one is packed (spec 2.1)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    size: int


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One frame.

    `places` are None where there are no tensors to speak of, and lie in `region`, 0 for none. `region_size` is not
    0 when the region is new: its file descriptor comes with the frame. `released`: regions of the other side that
    are read no more. `call`: the call that it belongs to. `text`: JSON.
    """

    kind: Kind
    call: int = 0
    text: bytes = b""
    places: tuple[Place, ...] | None = None
    region: int = 0
    region_size: int = 0
    released: tuple[int, ...] = ()


def pack(frame: Frame) -> bytes:
    """The frame as bytes. Raises `FrameError` for one that is too long."""
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
    """The frame of these bytes, without their length. Raises `FrameError`."""
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
    """Bytes as they come, to frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises `FrameError`."""
        if data and not self._data and _end(data) == len(data):
            return [unpack(memoryview(data)[LENGTH.size :])]  # As it is nearly always.
        self._data += data
        frames = []
        while (end := _end(self._data)) and len(self._data) >= end:
            frames.append(unpack(bytes(self._data[LENGTH.size : end])))
            del self._data[:end]
        return frames


def _end(data: bytes | bytearray) -> int:
    """Where the first frame ends; 0 as long as nobody knows. Raises `FrameError`."""
    if len(data) < LENGTH.size:
        return 0
    (length,) = LENGTH.unpack_from(data)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes: expected at most {MAX_FRAME}")
    return LENGTH.size + int(length)
