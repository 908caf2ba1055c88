"""The little of HTTP/2 (RFC 9113) and HPACK (RFC 7541) that the load client writes."""

import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 3, 4, 5
DEFAULT_WINDOW, LARGEST_WINDOW = 2**16 - 1, 2**31 - 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME = struct.Struct(">IBI")  # length (24 bits) and type (8), flags, stream
SETTING = struct.Struct(">HI")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def window_update(step: int) -> bytes:
    """Gives the peer so many bytes more on the connection."""
    return frame(WINDOW_UPDATE, 0, 0, step.to_bytes(4, "big"))


def _literal(name: bytes | int, value: bytes) -> bytes:
    """A header field "without indexing"; the name is a string or its place in HPACK's static table."""
    if isinstance(name, int):
        first = bytes([name]) if name < 15 else bytes([15, name - 15])
    else:
        first = bytes([0, len(name)]) + name
    if len(value) > 126:
        raise ValueError(f"header value too long for this encoder: {value!r}")
    return first + bytes([len(value)]) + value


def request_headers(path: str, authority: str) -> bytes:
    """The header block of a unary gRPC call, with the fields that C-core sends."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            _literal(4, path.encode()),
            _literal(1, authority.encode()),
            _literal(31, b"application/grpc"),
            _literal(b"te", b"trailers"),
            _literal(b"grpc-accept-encoding", b"identity, deflate, gzip"),
            _literal(58, b"triglot-bench"),
        )
    )
