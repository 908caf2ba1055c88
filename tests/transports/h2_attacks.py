"""What clients send that want to do harm, by name, and the error that ends their connection."""

from __future__ import annotations

from collections.abc import Callable

import hpack

from tests.transports.h2_peers import Client, data, frame, message, request_fields
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode

MANY = 6000
Attack = Callable[[Client], bytes]
END_BOTH = frames.END_HEADERS | frames.END_STREAM
WINDOW = frames.Setting.INITIAL_WINDOW_SIZE
BOMB = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000
"""A field for the table; with its index, one byte is 4 KB where it is decoded."""


def hpack_bomb() -> bytes:
    """Many indices of a large field: all that ends is their call."""
    call = [hpack.NeverIndexedHeaderTuple(*field) for field in request_fields("Echo")]
    return frame(frames.HEADERS, END_BOTH, 1, hpack.Encoder().encode(call) + BOMB + b"\xbe" * 10_000)


def resets(client: Client, name: str) -> bytes:
    """Calls that are reset at once, many times as many as a stock client has that cancels all of its calls."""
    return b"".join(
        client.headers(stream, name) + frames.rst_stream(stream, ErrorCode.CANCEL)
        for stream in range(1, 8 * MANY, 2)
    )


def made_to_reset(wrong: Callable[[Client, int], bytes]) -> Attack:
    """Calls, with something wrong on each stream: the server resets it, and its work continues (CVE-2025-8671)."""
    return lambda client: b"".join(
        client.headers(stream, "Held") + data(stream, message(b"")) + wrong(client, stream)
        for stream in range(1, MANY, 2)
    )


def flood(part: bytes, count: int = MANY) -> Attack:
    """The same again and again."""
    return lambda _: part * count


def echo_and(behind: bytes, *, flags: int = frames.END_HEADERS) -> Attack:
    """A call, and something behind its headers."""
    return lambda client: client.headers(1, "Echo", flags=flags) + behind


def much_metadata(client: Client) -> bytes:
    return frame(frames.HEADERS, 0, 1, client.block([("a", "x" * 4_000_000)])) + frame(
        frames.CONTINUATION, 0, 1, client.block([("a", "x" * 400_000)])
    )


def resource_loop(client: Client) -> bytes:
    calls = b"".join(client.headers(stream, "Held") for stream in range(1, 20, 2))
    tree = [
        frame(frames.PRIORITY, 0, 1 + 2 * at % 20, (2 * at % 18 + 3 | 1 << 31).to_bytes(4) + b"\xff")
        for at in range(MANY)
    ]
    return calls + b"".join(tree)


def windows_to_and_fro(client: Client) -> bytes:
    calls = b"".join(client.headers(stream, "Held") for stream in range(1, 200, 2))
    return calls + (frames.settings({WINDOW: 0}) + frames.settings({WINDOW: 1})) * (MANY // 2)


def dribble(client: Client) -> bytes:
    call = client.headers(1, "Echo") + data(1, message(bytes(MANY)))
    return frames.settings({WINDOW: 0}) + call + frames.window_update(1, 1) * MANY


BY_CODE: dict[ErrorCode, dict[str, Attack]] = {
    ErrorCode.ENHANCE_YOUR_CALM: {
        "rapid reset": lambda client: resets(client, "Held"),
        "resets of calls that are not served": lambda client: resets(client, "No"),
        "made to reset by no window": made_to_reset(lambda _, stream: frames.window_update(stream, 0)),
        "made to reset by a large window": made_to_reset(
            lambda _, stream: frames.window_update(stream, frames.LARGEST_WINDOW)
        ),
        "made to reset by data": made_to_reset(lambda _, stream: data(stream, b"x")),
        "made to reset by headers": made_to_reset(
            lambda client, stream: client.raw_headers(stream, [("a", "b")], END_BOTH)
        ),
        "made to reset by a priority": made_to_reset(
            lambda _, stream: frame(frames.PRIORITY, 0, stream, bytes(4))
        ),
        "malformed requests": lambda client: b"".join(
            client.raw_headers(stream, [("A", "b")], END_BOTH) for stream in range(1, MANY, 2)
        ),
        "more streams than may be": lambda client: b"".join(
            client.headers(stream, "Held") for stream in range(1, 2 * MANY, 2)
        ),
        "empty continuations": echo_and(frame(frames.CONTINUATION, 0, 1) * 1000, flags=0),
        "large continuations": echo_and(frame(frames.CONTINUATION, 0, 1, bytes(15_000)) * 300, flags=0),
        "an HPACK bomb without end": lambda _: (
            frame(frames.HEADERS, 0, 1, BOMB) + frame(frames.CONTINUATION, 0, 1, b"\xbe" * 16_000) * 300
        ),
        "much metadata": much_metadata,
        "settings": flood(frames.settings({})),
        "many settings at once": flood(frame(frames.SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x01" * 1000), 1),
        "acknowledgements": flood(frame(frames.SETTINGS, frames.ACK, 0)),
        "pings": flood(frames.ping(bytes(8))),
        "pongs": flood(frames.ping(bytes(8), ack=True)),
        "priorities": flood(frame(frames.PRIORITY, 0, 3, bytes(5))),
        "a resource loop": resource_loop,
        "window updates": flood(frames.window_update(0, 1)),
        "data that dribbles": dribble,
        "windows to and fro": windows_to_and_fro,
        "unknown frames": flood(frame(0xEE, 0, 0)),
        "a large frame of an unknown kind": flood(frames.head(500_000, 0xEE, 0, 1), 1),
        "goaways": flood(frames.goaway(0, ErrorCode.NO_ERROR)),
        "empty data": echo_and(data(1, b"", end=False) * MANY),
        "padding only": echo_and(frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(255)) * MANY),
        "late resets": echo_and(data(1, message(b"")) + frames.rst_stream(1, ErrorCode.CANCEL) * MANY),
    },
    ErrorCode.FLOW_CONTROL_ERROR: {
        "a window that overflows": flood(frames.window_update(0, frames.LARGEST_WINDOW), 1),
        "more than the window": lambda client: client.headers(1, "Both") + data(1, bytes(900_000), end=False) * 20,
    },
    ErrorCode.FRAME_SIZE_ERROR: {"a large frame": flood(frames.head(2**24 - 1, frames.DATA, 0, 1), 1)},
    ErrorCode.COMPRESSION_ERROR: {
        "headers that are none": flood(frame(frames.HEADERS, END_BOTH, 1, b"\xff\xff\xff\xff"), 1),
        "an endless number": flood(frame(frames.HEADERS, END_BOTH, 1, b"\xff" * 40_000), 1),
        "a large table": flood(frame(frames.HEADERS, END_BOTH, 1, b"\x3f\xe1\xff\xff\x07"), 1),
    },
}
ATTACKS = {name: (code, made) for code, attacks in BY_CODE.items() for name, made in attacks.items()}
