"""HTTP/2 frames: constants, and functions that pack the frames that we send (RFC 9113, 4 to 7)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20
LARGEST_WINDOW: Final = 2**31 - 1
SMALLEST_MAX_FRAME: Final = 2**14
LARGEST_MAX_FRAME: Final = 2**24 - 1
DEFAULT_WINDOW: Final = 65_535
"""Initial window of a connection, and of a stream unless SETTINGS change it."""


class ErrorCode(enum.IntEnum):
    """Error codes of streams and connections (RFC 9113, 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(enum.IntEnum):
    """Settings of a SETTINGS frame (RFC 9113, 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


HEAD: Final = struct.Struct(">LBL")
"""A frame header: length (24 bits) and type; flags; stream."""
_SETTING: Final = struct.Struct(">HL")
WORD: Final = struct.Struct(">L")
"""A number of 32 bits, such as a window's increment."""
_GOAWAY: Final = struct.Struct(">LL")


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the nine-byte header of a frame with a payload of `length` bytes."""
    return HEAD.pack(length << 8 | kind, flags, stream)


def settings(values: Mapping[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    payload = b"".join([_SETTING.pack(key, value) for key, value in values.items()])
    return head(len(payload), SETTINGS, 0, 0) + payload


def read_settings(payload: memoryview) -> list[tuple[int, int]]:
    """Return the settings of a frame in order, unknown ones included."""
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, by: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return head(4, WINDOW_UPDATE, 0, stream) + WORD.pack(by)


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return head(4, RST_STREAM, 0, stream) + WORD.pack(code)


def ping(data: bytes, *, ack: bool = False) -> bytes:
    """Return a PING frame with eight bytes of data."""
    return head(8, PING, ACK if ack else 0, 0) + data


def goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """Return a GOAWAY frame with a debug text."""
    payload = _GOAWAY.pack(last_stream, code) + text.encode()[:256]
    return head(len(payload), GOAWAY, 0, 0) + payload
