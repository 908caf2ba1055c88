"""The HTTP/2 core against RFC 9113: what is wrong and how it ends, and that no bytes make it fail."""

from __future__ import annotations

from typing import Any

import hpack
import pytest
from h2_peers import data, frame, greeting
from hypothesis import given, settings
from hypothesis import strategies as st

from triglot.transports.h2 import frames
from triglot.transports.h2.connection import Connection
from triglot.transports.h2.events import ConnectionEnded, DataReceived, RequestReceived, StreamReset
from triglot.transports.h2.frames import ErrorCode
from triglot.transports.h2.headers import MalformedRequest
from triglot.transports.h2.limits import Limits
from triglot.transports.h2.requests import RpcHead, read_head

FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")]
END_BOTH = frames.END_HEADERS | frames.END_STREAM
# One byte for each of the first two; a literal path.
BLOCK = b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc"
OPEN = frame(frames.HEADERS, frames.END_HEADERS, 1, BLOCK)
CLOSED = frame(frames.HEADERS, END_BOTH, 1, BLOCK)


def connection(**limits: Any) -> Connection[RpcHead]:
    return Connection(read_head, Limits(**limits))


def answered(one: Connection[RpcHead]) -> None:
    for number in list(one.streams):
        one.out.headers(number, b"\x88", end=True)


def block(*fields: tuple[str, str]) -> bytes:
    return hpack.Encoder().encode(fields)


def wrong_block(*fields: tuple[str, str]) -> bytes:
    return frame(frames.HEADERS, END_BOTH, 1, block(*fields))


CONNECTION_ERRORS = {
    "even stream": (ErrorCode.PROTOCOL_ERROR, frame(frames.HEADERS, END_BOTH, 2, BLOCK)),
    "headers on stream 0": (ErrorCode.PROTOCOL_ERROR, frame(frames.HEADERS, END_BOTH, 0, BLOCK)),
    "a number again": (ErrorCode.STREAM_CLOSED, CLOSED),
    "a lower number": (ErrorCode.STREAM_CLOSED, frame(frames.HEADERS, END_BOTH, 5, BLOCK) + CLOSED),
    "data on an idle stream": (ErrorCode.PROTOCOL_ERROR, data(3, b"1")),
    "data on stream 0": (ErrorCode.PROTOCOL_ERROR, data(0, b"1")),
    "too much padding of data": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.DATA, frames.PADDED, 3, b"\x02a"),
    ),
    "no length of padding": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.DATA, frames.PADDED, 3, b"")),
    "too much padding of headers": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, END_BOTH | frames.PADDED, 5, b"\x05" + bytes(4)),
    ),
    "half a priority": (
        ErrorCode.FRAME_SIZE_ERROR,
        frame(frames.HEADERS, END_BOTH | frames.WITH_PRIORITY, 5, bytes(4)),
    ),
    "continuation alone": (ErrorCode.PROTOCOL_ERROR, frame(frames.CONTINUATION, 0, 1)),
    "no continuation": (ErrorCode.PROTOCOL_ERROR, frame(frames.HEADERS, 0, 5, BLOCK) + frames.ping(bytes(8))),
    "another's continuation": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 5, BLOCK) + frame(frames.CONTINUATION, 4, 7),
    ),
    "settings on a stream": (ErrorCode.PROTOCOL_ERROR, frame(frames.SETTINGS, 0, 1)),
    "settings of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 0, 0, bytes(5))),
    "acknowledging with settings": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 1, 0, bytes(6))),
    "large window": (ErrorCode.FLOW_CONTROL_ERROR, frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 2**31})),
    "small frame": (ErrorCode.PROTOCOL_ERROR, frames.settings({frames.Setting.MAX_FRAME_SIZE: 2**14 - 1})),
    "large frame": (ErrorCode.PROTOCOL_ERROR, frames.settings({frames.Setting.MAX_FRAME_SIZE: 2**24})),
    "push 2": (ErrorCode.PROTOCOL_ERROR, frames.settings({frames.Setting.ENABLE_PUSH: 2})),
    "ping on a stream": (ErrorCode.PROTOCOL_ERROR, frame(frames.PING, 0, 1, bytes(8))),
    "ping of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.PING, 0, 0, bytes(7))),
    "goaway on a stream": (ErrorCode.PROTOCOL_ERROR, frame(frames.GOAWAY, 0, 1, bytes(8))),
    "goaway of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.GOAWAY, 0, 0, bytes(7))),
    "reset of stream 0": (ErrorCode.PROTOCOL_ERROR, frame(frames.RST_STREAM, 0, 0, bytes(4))),
    "reset of an idle stream": (ErrorCode.PROTOCOL_ERROR, frame(frames.RST_STREAM, 0, 5, bytes(4))),
    "reset of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.RST_STREAM, 0, 3, bytes(3))),
    "window of an idle stream": (ErrorCode.PROTOCOL_ERROR, frames.window_update(5, 1)),
    "window of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.WINDOW_UPDATE, 0, 0, bytes(3))),
    "window by nothing": (ErrorCode.PROTOCOL_ERROR, frames.window_update(0, 0)),
    "window too large": (ErrorCode.FLOW_CONTROL_ERROR, frames.window_update(0, 2**31 - 1)),
    "priority of stream 0": (ErrorCode.PROTOCOL_ERROR, frame(frames.PRIORITY, 0, 0, bytes(5))),
    "push": (ErrorCode.PROTOCOL_ERROR, frame(frames.PUSH_PROMISE, 4, 1, bytes(4))),
    "unknown index": (ErrorCode.COMPRESSION_ERROR, frame(frames.HEADERS, END_BOTH, 5, b"\xff\x00")),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_connection_errors(name: str) -> None:
    code, wrong = CONNECTION_ERRORS[name]
    one = connection()
    one.feed(greeting() + CLOSED)
    answered(one)  # Stream 1 is over.
    if name not in ("data on an idle stream", "reset of an idle stream", "window of an idle stream"):
        one.feed(frame(frames.HEADERS, frames.END_HEADERS, 3, BLOCK))
    one.out.take()
    events = one.feed(wrong)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].code == code
    last = one.out.take()[-1]
    assert last[3] == frames.GOAWAY
    assert int.from_bytes(last[13:17]) == code
    assert one.feed(frames.ping(bytes(8))) == []


@pytest.mark.parametrize("first", [frames.ping(bytes(8)), frame(frames.SETTINGS, frames.ACK, 0), OPEN])
def test_settings_come_first(first: bytes) -> None:
    (ended,) = connection().feed(frames.PREFACE + first)
    assert isinstance(ended, ConnectionEnded)
    assert ended.code is ErrorCode.PROTOCOL_ERROR


STREAM_ERRORS = {
    "data after the end": (ErrorCode.STREAM_CLOSED, CLOSED + data(1, b"1")),
    "trailers after the end": (ErrorCode.STREAM_CLOSED, CLOSED + frame(frames.HEADERS, END_BOTH, 1, b"")),
    "trailers that do not end": (ErrorCode.PROTOCOL_ERROR, OPEN + frame(frames.HEADERS, 4, 1, b"")),
    "pseudo-header in trailers": (ErrorCode.PROTOCOL_ERROR, OPEN + frame(frames.HEADERS, END_BOTH, 1, b"\x83")),
    "window by nothing": (ErrorCode.PROTOCOL_ERROR, OPEN + frames.window_update(1, 0)),
    "window too large": (ErrorCode.FLOW_CONTROL_ERROR, OPEN + frames.window_update(1, 2**31 - 1)),
    "more than the window": (ErrorCode.FLOW_CONTROL_ERROR, OPEN + data(1, bytes(101))),
    "priority of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, OPEN + frame(frames.PRIORITY, 0, 1, bytes(4))),
    "capitals": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("Name", "x"))),
    "a blank in a name": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("na me", "x"))),
    "a line's end": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("name", "x\r\ny"))),
    "a blank at the end": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("name", "x "))),
    "connection": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("connection", "close"))),
    "te": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("te", "gzip"))),
    "twice": (ErrorCode.PROTOCOL_ERROR, wrong_block(FIELDS[0], *FIELDS)),
    "late": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[1:], FIELDS[0])),
    "unknown": (ErrorCode.PROTOCOL_ERROR, wrong_block((":status", "200"), *FIELDS)),
    "no path": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[:2])),
    "nothing": (ErrorCode.PROTOCOL_ERROR, wrong_block()),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_errors(name: str) -> None:
    code, wrong = STREAM_ERRORS[name]
    one = connection(stream_window=100)
    one.feed(greeting())
    one.out.take()
    events = one.feed(wrong)
    assert frames.rst_stream(1, code) in one.out.take()
    assert not any(isinstance(event, ConnectionEnded) for event in events)
    began = any(isinstance(event, RequestReceived) for event in events)
    assert any(isinstance(event, StreamReset) and event.by_us for event in events) == began
    # Others go on, and what was on its way to the stream is dropped.
    events = one.feed(frames.rst_stream(1, ErrorCode.CANCEL) + frame(frames.HEADERS, END_BOTH, 3, BLOCK))
    assert [event.stream for event in events if isinstance(event, RequestReceived)] == [3]


def test_unknown_frames_settings_and_flags_say_nothing() -> None:
    one = connection()
    one.feed(greeting())
    one.out.take()
    unknown = frame(0xAB, 0xFF, 7, b"text") + frame(frames.SETTINGS, 0xFE, 0, b"\xab\xcd\x00\x00\x00\x01")
    assert one.feed(unknown + frame(frames.PRIORITY, 0xFF, 9, bytes(5))) == []
    assert one.out.take() == [frame(frames.SETTINGS, frames.ACK, 0)]
    (event,) = one.feed(frame(frames.HEADERS, END_BOTH | 0xD2, 1, BLOCK))
    assert isinstance(event, RequestReceived)


def test_a_block_in_many_frames_with_padding_and_priority() -> None:
    one = connection()
    first = b"\x03" + bytes(5) + BLOCK[:7] + bytes(3)
    flags = frames.END_STREAM | frames.PADDED | frames.WITH_PRIORITY
    events = one.feed(
        greeting()
        + frame(frames.HEADERS, flags, 1, first)
        + frame(frames.CONTINUATION, 0, 1, BLOCK[7:20])
        + frame(frames.CONTINUATION, 0, 1)
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[20:])
    )
    (event,) = events
    assert isinstance(event, RequestReceived)
    assert event.ended
    assert event.headers.path == "/a/b"


def test_blocks_are_remembered_only_while_they_mean_the_same() -> None:
    encoder, seen = hpack.Encoder(), []
    one: Connection[dict[bytes, bytes]] = Connection(dict)
    one.feed(greeting())
    names = ["a", "a", "b", "a", "c", "c", "b", "a"]
    for at, name in enumerate(names):
        if at == 4:
            encoder.header_table_size = 64
        if at == 6:
            encoder.header_table_size = 4096
        made = encoder.encode([(":path", name), ("name", name)])
        (event,) = one.feed(frame(frames.HEADERS, END_BOTH, 2 * at + 1, made))
        assert isinstance(event, RequestReceived)
        seen.append(event.headers[b"name"].decode())
    assert seen == names


def test_a_long_block_leaves_in_several_frames() -> None:
    one = connection()
    one.feed(greeting() + CLOSED)
    one.out.take()
    one.out.headers(1, bytes(40_000), end=True)
    sent = b"".join(one.out.take())
    at, got = 0, []
    while at < len(sent):
        length = int.from_bytes(sent[at : at + 3])
        got.append((sent[at + 3], sent[at + 4], length))
        at += frames.HEAD_BYTES + length
    assert got == [(1, 1, 16_384), (9, 0, 16_384), (9, 4, 7232)]


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=10))
def test_any_fields_are_a_head_or_malformed(fields: list[tuple[bytes, bytes]]) -> None:
    good = [(name.encode(), value.encode()) for name, value in FIELDS]
    for several in (fields, good + fields, [*good, *((b"x-bin", value) for _, value in fields)]):
        try:
            head = read_head(several)
        except MalformedRequest:
            continue
        assert head.path


# --- any bytes ---

KINDS = st.integers(0, 11)
PAYLOADS = st.binary(max_size=40) | st.sampled_from(
    [BLOCK, bytes(4), bytes(5), bytes(8), b"\x00\x04\x00\x00\x00\x05"]
)
ANY_FRAME = st.builds(frame, KINDS, st.integers(0, 255), st.integers(0, 9), PAYLOADS)
GOOD_FRAME = st.sampled_from(
    [OPEN, CLOSED, data(1, b"12345", end=False), data(1, b"6"), frames.ping(bytes(8))]
) | (
    st.builds(lambda stream: frame(frames.HEADERS, frames.END_HEADERS, 2 * stream + 1, BLOCK), st.integers(0, 30))
)


def act(one: Connection[RpcHead], events: list[Any]) -> list[Any]:
    """What an owner does that answers at once, and what it saw: parts of a body put together."""
    seen: list[Any] = []
    for event in events:
        if isinstance(event, DataReceived):
            one.consumed(event.stream, len(event.data))
            if seen and isinstance(seen[-1], list) and seen[-1][0] == event.stream:
                seen[-1][1] += bytes(event.data)
                seen[-1][2] |= event.ended
            else:
                seen.append([event.stream, bytes(event.data), event.ended])
        else:
            seen.append(event)
    return seen


@settings(max_examples=300)
@given(st.lists(ANY_FRAME | GOOD_FRAME | st.binary(max_size=30), max_size=20), st.booleans())
def test_no_bytes_make_it_fail(parts: list[bytes], answers: bool) -> None:
    one = connection()
    one.feed(greeting())
    for part in parts:
        act(one, one.feed(part))
        if answers and not one.over:
            answered(one)
    sent = b"".join(one.out.take())
    assert one.over == (sent != b"" and _kinds(sent)[-1] == frames.GOAWAY)


def _kinds(sent: bytes) -> list[int]:
    at, kinds = 0, []
    while at < len(sent):
        kinds.append(sent[at + 3])
        at += frames.HEAD_BYTES + int.from_bytes(sent[at : at + 3])
    assert at == len(sent)
    return kinds


@settings(max_examples=300)
@given(st.lists(ANY_FRAME | GOOD_FRAME, max_size=20), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_any_cutting_is_the_same(parts: list[bytes], sizes: list[int]) -> None:
    whole, cut = connection(), connection()
    stream = greeting() + b"".join(parts)
    expected = act(whole, whole.feed(stream))
    events: list[Any] = []
    at = turn = 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        events += cut.feed(stream[at : at + size])
        at += size
        turn += 1
    assert act(cut, events) == expected
    assert cut.streams.keys() == whole.streams.keys()
    assert cut.over == whole.over
