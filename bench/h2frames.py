"""The part of HTTP/2 (RFC 9113) that the load client writes."""

import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
DEFAULT_WINDOW, LARGEST_WINDOW = 2**16 - 1, 2**31 - 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME = struct.Struct(">IBI")  # length (24 bits) and type (8), flags, stream
SETTING = struct.Struct(">HI")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """Return a SETTINGS frame with these pairs of identifier and value."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def window_update(step: int) -> bytes:
    """Return a WINDOW_UPDATE frame that allows the peer `step` more bytes on the connection."""
    return frame(WINDOW_UPDATE, 0, 0, step.to_bytes(4, "big"))
