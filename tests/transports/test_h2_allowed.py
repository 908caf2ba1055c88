"""The HTTP/2 core against RFC 9113: what is allowed, and what it makes of it."""

from __future__ import annotations

import hpack
import pytest

from tests.transports.h2_core import BLOCK, CLOSED, END_BOTH, OPEN, Part, act, connection, request
from tests.transports.h2_peers import data, frame, greeting, pairs_of
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import FEW_BYTES, MANY_RUNNING, READ_BYTES
from triglot.transports.http2.core.events import ConnectionEnded, GoAwayReceived, StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived


def test_unknown_frames_settings_and_flags_say_nothing() -> None:
    server = connection()
    server.feed(greeting())
    server.out.take()
    unknown = frame(0xAB, 0xFF, 7, b"text") + frame(frames.SETTINGS, 0xFE, 0, b"\xab\xcd\x00\x00\x00\x01")
    assert server.feed(unknown + frame(frames.PRIORITY, 0xFF, 9, bytes(5))) == []
    assert server.out.take() == [frame(frames.SETTINGS, frames.ACK, 0)]
    (event,) = server.feed(frame(frames.HEADERS, END_BOTH | 0xD2, 1, BLOCK))
    assert isinstance(event, RequestReceived)


def test_what_is_allowed_says_nothing_more() -> None:
    server = connection()
    server.feed(greeting())
    server.out.take()
    # The reserved bit, an error code that does not exist, a dependency on itself.
    reserved = frame(frames.HEADERS, frames.END_HEADERS, 1 | 1 << 31, BLOCK)
    on_itself = frame(frames.PRIORITY, 0, 1, (1).to_bytes(4) + b"\x10")
    (began,) = server.feed(reserved + on_itself)
    assert isinstance(began, RequestReceived)
    assert began.stream == 1
    (reset,) = server.feed(frame(frames.RST_STREAM, 0, 1, b"\0\0\0\xff"))
    assert isinstance(reset, StreamReset)
    assert (reset.code, reset.by_us) == (0xFF, False)
    (event,) = server.feed(frame(frames.GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff" + b"why"))
    assert event == GoAwayReceived(0xFF, "why")
    # No answer to an answer, and the same bytes to a question.
    server.feed(frames.ping(b"12345678", ack=True) + frames.ping(b"abcdefgh"))
    assert server.out.take() == [frames.ping(b"abcdefgh", ack=True)]


def test_of_several_windows_in_settings_the_last_one_counts() -> None:
    server = connection()
    twice = frame(frames.SETTINGS, 0, 0, b"\0\4\0\0\0\x64" + b"\0\4\0\0\0\2")
    server.feed(greeting() + twice + CLOSED)
    server.out.take()
    server.out.headers(1, b"\x88")
    assert not server.out.data(1, [b"123"])
    assert server.out.take()[1:] == [data(1, b"12", end=False)]


def test_data_after_a_reset_is_that_streams_fault_alone() -> None:
    server = connection()
    server.feed(greeting() + OPEN + frames.rst_stream(1, ErrorCode.CANCEL))
    server.out.take()
    assert server.feed(data(1, b"late")) == []
    assert server.out.take() == [frames.rst_stream(1, ErrorCode.STREAM_CLOSED)]
    assert not server.over


@pytest.mark.parametrize("size", [frames.SMALLEST_MAX_FRAME, 100_000, 100_001])
def test_how_large_a_frame_may_be(size: int) -> None:
    server = connection(max_frame=100_000)
    events = act(server, server.feed(greeting() + OPEN + data(1, bytes(size))))
    if size <= 100_000:
        assert events[1:] == [Part(1, bytes(size), end_stream=True)]
    else:
        assert isinstance(events[-1], ConnectionEnded)
        assert events[-1].code is ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize("padding", [0, 1, 255])
def test_padding_alone_ends_a_request_too(padding: int) -> None:
    server = connection()
    flags = frames.PADDED | frames.END_STREAM
    events = act(
        server, server.feed(greeting() + OPEN + frame(frames.DATA, flags, 1, bytes([padding]) + bytes(padding)))
    )
    assert events[1:] == [Part(1, b"", end_stream=True)]


def test_a_block_that_changes_the_tables_size_is_read_each_time() -> None:
    server = connection()
    small, large = b"\x3f\xa9\x01", b"\x3f\xe1\x1f"  # 200 and 4096 bytes.
    server.feed(greeting())
    for number, size in ((1, small), (3, large), (5, small)):
        server.feed(frame(frames.HEADERS, END_BOTH, number, size + BLOCK))
    stored = b"\x40\x01a\x7f\x7b" + b"x" * 250
    server.feed(frame(frames.HEADERS, END_BOTH, 7, BLOCK + stored))
    assert not server.over
    # It was too large for the table.
    assert isinstance(server.feed(frame(frames.HEADERS, END_BOTH, 9, BLOCK + b"\xbe"))[-1], ConnectionEnded)


def test_whole_requests_keep_to_the_connections_window() -> None:
    server = connection(connection_window=70_000, stream_window=100_000)
    server.feed(greeting())
    events = [event for number in range(1, 61, 2) for event in server.feed(request(number, bytes(5000)))]
    assert sum(isinstance(event, CompleteRequest) for event in events) == 30
    server.feed(frame(frames.HEADERS, frames.END_HEADERS, 61, BLOCK) + data(61, bytes(20_000), end=False))
    assert not server.over
    (*_, end) = server.feed(request(63, bytes(50_000)))
    assert isinstance(end, ConnectionEnded)
    assert end.code is ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("narrow", ["stream", "connection", "socket"])
def test_a_small_answer_keeps_to_every_window(narrow: str) -> None:
    server = connection()
    window = {frames.Setting.INITIAL_WINDOW_SIZE: 5 if narrow == "stream" else 100_000}
    server.feed(frames.PREFACE + frames.settings(window) + CLOSED)
    before = 0
    if narrow == "connection":
        before = frames.DEFAULT_WINDOW - 5
        server.feed(frame(frames.HEADERS, END_BOTH, 3, BLOCK))
        server.out.respond(3, b"\x88", [bytes(before)], before, b"\x88")
    elif narrow == "socket":
        server.out.pause()
    server.out.take()
    server.out.respond(1, b"\x88", [b"123456789"], 9, b"\x88")
    first = [] if narrow == "socket" else [data(1, b"12345", end=False)]
    assert server.out.take() == [frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x88"), *first]
    server.out.resume()
    server.feed(frames.window_update(0, 100) + frames.window_update(1, 100))
    rest = data(1, b"123456789" if narrow == "socket" else b"6789", end=False)
    assert server.out.take() == [rest, frame(frames.HEADERS, END_BOTH, 1, b"\x88")]
    assert server.out.unsent == 0


def test_padding_takes_no_room_for_ever() -> None:
    server = connection(connection_window=70_000, stream_window=70_000)
    server.feed(greeting() + OPEN)
    padded = frame(frames.DATA, frames.PADDED, 1, b"\xff" + b"x" + bytes(255))
    came = b"".join(part.data for _ in range(600) for part in act(server, server.feed(padded)))
    assert came == b"x" * 600
    assert list(server.streams) == [1]


def test_the_server_begins_with_its_settings() -> None:
    first = connection().out.take()[0]
    assert first[3] == frames.SETTINGS
    settings = dict(frames.read_settings(memoryview(first)[frames.HEAD_BYTES :]))
    assert settings[frames.Setting.MAX_CONCURRENT_STREAMS] == Limits().max_streams
    assert settings[frames.Setting.MAX_HEADER_LIST_SIZE] == 16 * 1024
    assert frames.Setting.ENABLE_PUSH not in settings


def test_a_block_in_many_frames_with_padding_and_priority() -> None:
    server = connection()
    first = b"\x03" + bytes(5) + BLOCK[:7] + bytes(3)
    flags = frames.END_STREAM | frames.PADDED | frames.HAS_PRIORITY
    events = server.feed(
        greeting()
        + frame(frames.HEADERS, flags, 1, first)
        + frame(frames.CONTINUATION, 0, 1, BLOCK[7:20])
        + frame(frames.CONTINUATION, 0, 1)
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[20:])
    )
    (event,) = events
    assert isinstance(event, RequestReceived)
    assert event.end_stream
    assert event.headers.path == "/a/b"


def test_equal_blocks_mean_what_the_table_has_then() -> None:
    encoder, seen = hpack.Encoder(), []
    server = connection()
    server.feed(greeting())
    names = ["a", "a", "b", "b", "c", "c", "b", "a", "b", "b", "a", "a"]
    for at, name in enumerate(names):
        if at == 4:
            encoder.header_table_size = 64
        if at == 6:
            encoder.header_table_size = 4096
        made = encoder.encode([(":method", "POST"), (":scheme", "http"), (":path", name), ("name", name)])
        (event,) = server.feed(frame(frames.HEADERS, END_BOTH, 2 * at + 1, made))
        assert isinstance(event, RequestReceived)
        seen.append(dict(pairs_of(event.headers.fields))[b"name"].decode())
    assert seen == names


def test_a_long_block_leaves_in_several_frames() -> None:
    server = connection()
    server.feed(greeting() + CLOSED)
    server.out.take()
    server.out.headers(1, bytes(40_000), end=True)
    sent = b"".join(server.out.take())
    at, got = 0, []
    while at < len(sent):
        length = int.from_bytes(sent[at : at + 3])
        got.append((sent[at + 3], sent[at + 4], length))
        at += frames.HEAD_BYTES + length
    assert got == [(1, 1, 16_384), (9, 0, 16_384), (9, 4, 7232)]


def test_complete_request_is_one_event() -> None:
    server = connection(stream_window=20)
    events = server.feed(greeting() + b"".join(request(number, b"body") for number in (1, 3, 5)))
    assert [(event.stream, event.body) for event in events if isinstance(event, CompleteRequest)] == [
        (1, b"body"),
        (3, b"body"),
        (5, b"body"),
    ]
    # Each of these is looked at more closely.
    refused = request(7, bytes(21)) + request(5, b"") + request(4, b"")
    assert not any(isinstance(event, CompleteRequest) for event in server.feed(refused))
    assert frames.rst_stream(7, ErrorCode.FLOW_CONTROL_ERROR) in server.out.take()


def test_what_was_reset_is_not_answered() -> None:
    for answer in ("respond", "parts"):
        server = connection()
        server.feed(greeting() + request(1, b"1") + request(3, b"2") + frames.rst_stream(3, ErrorCode.CANCEL))
        server.out.take()
        if answer == "respond":
            server.out.respond(3, b"\x88", [b"1"], 1, b"\x88")
        else:
            server.out.headers(3, b"\x88")
            assert server.out.data(3, [b"1"])
            server.out.trailers(3, b"\x88")
        assert server.out.take() == []
        assert server.out.unsent == 0


@pytest.mark.parametrize("kind", [frames.HEADERS, frames.CONTINUATION, 0xEE])
@pytest.mark.parametrize("more", [0, 1])
def test_the_largest_frame_that_may_come_has_room(kind: int, more: int) -> None:
    size = Limits().max_control_frame
    assert size + frames.HEAD_BYTES <= READ_BYTES
    size += more if kind != 0xEE else 0
    server = connection(max_continuations=2)
    server.feed(greeting() + CLOSED + (frame(frames.HEADERS, 0, 3) if kind == frames.CONTINUATION else b""))
    events = server.feed(frame(kind, 0, 3, b"\x80" * size) + frame(frames.CONTINUATION, frames.END_HEADERS, 3))
    assert isinstance(events[-1], ConnectionEnded)
    known = kind != 0xEE
    assert events[-1].code is (ErrorCode.COMPRESSION_ERROR if known else ErrorCode.PROTOCOL_ERROR)


def test_who_has_had_some_of_an_answer_may_leave() -> None:
    server = connection(abuse_budget=10.0, abuse_budget_per_second=0.0, max_earned=0)
    server.feed(greeting())
    for number in range(1, 401, 2):
        server.feed(request(number, b"1"))
        server.out.headers(number, b"\x88")
        server.out.data(number, [b"2"])
        (event,) = server.feed(frames.rst_stream(number, ErrorCode.CANCEL))
        assert type(event) is StreamReset
    assert not server.over


def test_streams_that_are_reset_together_with_their_requests_are_refused_first() -> None:
    server = connection(max_reset_running=10, abuse_budget=21.0, abuse_budget_per_second=0.0)
    server.feed(greeting())
    rapid = [request(at, b"1") + frames.rst_stream(at, ErrorCode.CANCEL) for at in range(1, 81, 2)]
    server.out.take()
    events = server.feed(b"".join(rapid[:30]))
    assert sum(isinstance(event, StreamReset) for event in events) == 10
    assert server.out.take() == [
        frames.rst_stream(number, ErrorCode.REFUSED_STREAM) for number in range(21, 61, 2)
    ]
    # By the next bytes the owner has acted on them.
    assert len(server.feed(b"".join(rapid[30:]))) == 20
    assert not server.over
    server = connection(max_reset_running=10, abuse_budget=20.0, abuse_budget_per_second=0.0)
    (*_, end) = server.feed(greeting() + b"".join(rapid[:30]))
    assert isinstance(end, ConnectionEnded)
    assert end.code is ErrorCode.ENHANCE_YOUR_CALM


def test_handlers_that_run_on_count_as_streams() -> None:
    server = connection(max_reset_running=2)
    server.feed(greeting())
    server.track_handler()
    server.track_handler()
    server.out.take()
    assert server.feed(request(1, b"1")) == []
    assert server.out.take() == [frames.rst_stream(1, ErrorCode.REFUSED_STREAM)]
    server.untrack_handler()
    assert len(server.feed(request(3, b"1"))) == 1


def test_little_is_read_at_a_time_while_many_handlers_run_on() -> None:
    server = connection()
    server.feed(greeting())
    for _ in range(MANY_RUNNING + 1):
        server.track_handler()
    assert len(server.get_buffer()) == FEW_BYTES
    first, *parts = act(server, server.feed(request(1, bytes(5000))))
    assert isinstance(first, RequestReceived)
    assert parts == [Part(1, bytes(5000), end_stream=True)]
    server.untrack_handler()
    assert len(server.get_buffer()) > FEW_BYTES


def test_a_stream_explains_its_windows_and_what_comes_late() -> None:
    server = connection(abuse_budget=1.0, abuse_budget_per_second=0.0)
    server.feed(greeting())
    for number in range(1, 2001, 2):
        server.feed(request(number, b"1") + frames.window_update(number, 5) * 2)
        server.out.headers(number, b"\x88", end=True)
        server.feed(
            frames.ping(bytes(8)) + frames.window_update(0, 5) + frames.rst_stream(number, ErrorCode.CANCEL)
        )
    assert not server.over
    server.feed(frames.ping(bytes(8)) * 2)
    assert server.over
