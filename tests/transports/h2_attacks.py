"""What clients send that want to do harm, by name, and the error that ends their connection."""

from __future__ import annotations

from collections.abc import Callable

import hpack
from h2_peers import Client, data, frame, message, request_fields

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode

MANY = 6000
Attack = Callable[[Client], bytes]
ATTACKS: dict[str, tuple[ErrorCode, Attack]] = {}


def attack(code: ErrorCode) -> Callable[[Attack], Attack]:
    def add(made: Attack) -> Attack:
        ATTACKS[made.__name__] = code, made
        return made

    return add


calm = attack(ErrorCode.ENHANCE_YOUR_CALM)
fields = frames.END_HEADERS | frames.END_STREAM


def resets(client: Client, name: str) -> bytes:
    """Calls that are reset at once, many times as many as a stock client has that cancels all of its calls."""
    return b"".join(
        client.headers(stream, name) + frames.rst_stream(stream, ErrorCode.CANCEL)
        for stream in range(1, 8 * MANY, 2)
    )


@calm
def rapid_reset(client: Client) -> bytes:
    return resets(client, "Held")


def made_to_reset(client: Client, wrong: Callable[[int], bytes]) -> bytes:
    """Calls, with something wrong on each stream: the server resets it, and its work continues (CVE-2025-8671)."""
    return b"".join(
        client.headers(stream, "Held") + data(stream, message(b"")) + wrong(stream) for stream in range(1, MANY, 2)
    )


@calm
def made_to_reset_by_no_window(client: Client) -> bytes:
    return made_to_reset(client, lambda stream: frames.window_update(stream, 0))


@calm
def made_to_reset_by_a_large_window(client: Client) -> bytes:
    return made_to_reset(client, lambda stream: frames.window_update(stream, frames.LARGEST_WINDOW))


@calm
def made_to_reset_by_data(client: Client) -> bytes:
    return made_to_reset(client, lambda stream: data(stream, b"x"))


@calm
def made_to_reset_by_headers(client: Client) -> bytes:
    return made_to_reset(client, lambda stream: client.raw_headers(stream, [("a", "b")], fields))


@calm
def made_to_reset_by_a_priority(client: Client) -> bytes:
    return made_to_reset(client, lambda stream: frame(frames.PRIORITY, 0, stream, bytes(4)))


@calm
def malformed_requests(client: Client) -> bytes:
    return b"".join(client.raw_headers(stream, [("A", "b")], fields) for stream in range(1, MANY, 2))


@calm
def unserved_calls(client: Client) -> bytes:
    return resets(client, "No")


@calm
def more_streams_than_may_be(client: Client) -> bytes:
    return b"".join(client.headers(stream, "Held") for stream in range(1, 2 * MANY, 2))


@calm
def empty_continuations(client: Client) -> bytes:
    return client.headers(1, "Echo", flags=0) + frame(frames.CONTINUATION, 0, 1) * 1000


@calm
def large_continuations(client: Client) -> bytes:
    return client.headers(1, "Echo", flags=0) + frame(frames.CONTINUATION, 0, 1, bytes(15_000)) * 300


def hpack_bomb() -> bytes:
    """Fields that take one byte each, and 4 KB each where they are decoded: all that ends is their call."""
    call = [hpack.NeverIndexedHeaderTuple(*field) for field in request_fields("Echo")]
    large = hpack.Encoder().encode(call) + b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 10_000
    return frame(frames.HEADERS, fields, 1, large)


@calm
def hpack_bomb_without_end(client: Client) -> bytes:
    bomb = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000
    more = frame(frames.CONTINUATION, 0, 1, b"\xbe" * 16_000)
    return frame(frames.HEADERS, 0, 1, bomb) + more * 300


@calm
def much_metadata(client: Client) -> bytes:
    return frame(frames.HEADERS, 0, 1, client.block([("a", "x" * 4_000_000)])) + frame(
        frames.CONTINUATION, 0, 1, client.block([("a", "x" * 400_000)])
    )


@calm
def settings_flood(client: Client) -> bytes:
    return frames.settings({}) * MANY


@calm
def settings_at_once(client: Client) -> bytes:
    return frame(frames.SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x01" * 1000)


@calm
def acknowledgements(client: Client) -> bytes:
    return frame(frames.SETTINGS, frames.ACK, 0) * MANY


@calm
def ping_flood(client: Client) -> bytes:
    return frames.ping(bytes(8)) * MANY


@calm
def pong_flood(client: Client) -> bytes:
    return frames.ping(bytes(8), ack=True) * MANY


@calm
def priority_flood(client: Client) -> bytes:
    return frame(frames.PRIORITY, 0, 3, bytes(5)) * MANY


@calm
def resource_loop(client: Client) -> bytes:
    calls = b"".join(client.headers(stream, "Held") for stream in range(1, 20, 2))
    tree = [
        frame(frames.PRIORITY, 0, 1 + 2 * at % 20, (2 * at % 18 + 3 | 1 << 31).to_bytes(4) + b"\xff")
        for at in range(MANY)
    ]
    return calls + b"".join(tree)


@calm
def window_update_flood(client: Client) -> bytes:
    return frames.window_update(0, 1) * MANY


@calm
def data_dribble(client: Client) -> bytes:
    small = frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0})
    return small + client.headers(1, "Echo") + data(1, message(bytes(MANY))) + frames.window_update(1, 1) * MANY


@calm
def windows_to_and_fro(client: Client) -> bytes:
    to, fro = (frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: size}) for size in (0, 1))
    calls = b"".join(client.headers(stream, "Held") for stream in range(1, 200, 2))
    return calls + (to + fro) * (MANY // 2)


@calm
def unknown_flood(client: Client) -> bytes:
    return frame(0xEE, 0, 0) * MANY


@calm
def goaway_flood(client: Client) -> bytes:
    return frames.goaway(0, ErrorCode.NO_ERROR) * MANY


@calm
def empty_data(client: Client) -> bytes:
    return client.headers(1, "Echo") + data(1, b"", end=False) * MANY


@calm
def padding_only(client: Client) -> bytes:
    return client.headers(1, "Echo") + frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(255)) * MANY


@calm
def late_resets(client: Client) -> bytes:
    return client.headers(1, "Echo") + data(1, message(b"")) + frames.rst_stream(1, ErrorCode.CANCEL) * MANY


@attack(ErrorCode.FLOW_CONTROL_ERROR)
def window_overflow(client: Client) -> bytes:
    return frames.window_update(0, frames.LARGEST_WINDOW)


@attack(ErrorCode.FLOW_CONTROL_ERROR)
def more_than_the_window(client: Client) -> bytes:
    return client.headers(1, "Both") + data(1, bytes(900_000), end=False) * 20


@attack(ErrorCode.FRAME_SIZE_ERROR)
def large_frame(client: Client) -> bytes:
    return frames.head(2**24 - 1, frames.DATA, 0, 1)


@calm
def large_frame_of_another_kind(client: Client) -> bytes:
    return frames.head(500_000, 0xEE, 0, 1)


@attack(ErrorCode.COMPRESSION_ERROR)
def wrong_headers(client: Client) -> bytes:
    return frame(frames.HEADERS, fields, 1, b"\xff\xff\xff\xff")


@attack(ErrorCode.COMPRESSION_ERROR)
def endless_number(client: Client) -> bytes:
    return frame(frames.HEADERS, fields, 1, b"\xff" * 40_000)


@attack(ErrorCode.COMPRESSION_ERROR)
def large_table(client: Client) -> bytes:
    return frame(frames.HEADERS, fields, 1, b"\x3f\xe1\xff\xff\x07")
