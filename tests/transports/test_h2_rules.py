"""The HTTP/2 core against RFC 9113: what is wrong and how it ends, and that no bytes make it fail."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.h2_core import BLOCK, CLOSED, END_BOTH, OPEN, answered, connection
from tests.transports.h2_peers import classified, data, frame, greeting
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import ConnectionEnded, StreamReset
from triglot.transports.http2.core.fields import MalformedRequest
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import RequestReceived, read_head

FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")]


def block(*fields: tuple[str, str]) -> bytes:
    return hpack.Encoder().encode(fields)


def undecodable(text: str) -> bytes:
    return frame(frames.HEADERS, END_BOTH, 5, bytes.fromhex(text))


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
        frame(frames.HEADERS, END_BOTH | frames.HAS_PRIORITY, 5, bytes(4)),
    ),
    "continuation alone": (ErrorCode.PROTOCOL_ERROR, frame(frames.CONTINUATION, 0, 1)),
    "no continuation": (ErrorCode.PROTOCOL_ERROR, frame(frames.HEADERS, 0, 5, BLOCK) + frames.ping(bytes(8))),
    "another's continuation": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 5, BLOCK) + frame(frames.CONTINUATION, 4, 7),
    ),
    "an extension within headers": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 5, BLOCK) + frame(0xEE, 0, 5),
    ),
    "data within headers": (ErrorCode.PROTOCOL_ERROR, frame(frames.HEADERS, 0, 5, BLOCK) + data(3, b"1")),
    "headers within headers": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 5, BLOCK) + frame(frames.HEADERS, END_BOTH, 5, BLOCK),
    ),
    "continuation after the end": (
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, END_BOTH, 5, BLOCK) + frame(frames.CONTINUATION, frames.END_HEADERS, 5),
    ),
    "continuation on an idle stream": (ErrorCode.PROTOCOL_ERROR, frame(frames.CONTINUATION, 4, 99)),
    "headers after a reset": (
        ErrorCode.STREAM_CLOSED,
        frames.rst_stream(3, ErrorCode.CANCEL) + frame(frames.HEADERS, END_BOTH, 3, BLOCK),
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
    "priority of a wrong size, idle": (ErrorCode.FRAME_SIZE_ERROR, frame(frames.PRIORITY, 0, 99, bytes(4))),
    "priority of stream 0": (ErrorCode.PROTOCOL_ERROR, frame(frames.PRIORITY, 0, 0, bytes(5))),
    "push": (ErrorCode.PROTOCOL_ERROR, frame(frames.PUSH_PROMISE, 4, 1, bytes(4))),
    # Of h2spec's list for HPACK (RFC 7541, 2.3.3, 4.2, 5.2, 6.1 and 6.3).
    "unknown index": (ErrorCode.COMPRESSION_ERROR, undecodable("ff00")),
    "index 0": (ErrorCode.COMPRESSION_ERROR, undecodable("80")),
    "a table that is too large": (ErrorCode.COMPRESSION_ERROR, undecodable("3fe1ffff07")),
    "a table's size at the end": (ErrorCode.COMPRESSION_ERROR, undecodable(BLOCK.hex() + "20")),
    "much padding of Huffman's": (ErrorCode.COMPRESSION_ERROR, undecodable("0085f2b24a84ff8449509fff")),
    "padding with zeros": (ErrorCode.COMPRESSION_ERROR, undecodable("0085f2b24a84ff83495090")),
    "the end of a string within": (ErrorCode.COMPRESSION_ERROR, undecodable("0085f2b24a84ff874951fffffffa7f")),
    "half a field": (ErrorCode.COMPRESSION_ERROR, undecodable("0005")),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_connection_errors(name: str) -> None:
    code, wrong = CONNECTION_ERRORS[name]
    server = connection()
    server.feed(greeting() + CLOSED)
    answered(server)  # Stream 1 is over.
    if name not in ("data on an idle stream", "reset of an idle stream", "window of an idle stream"):
        server.feed(frame(frames.HEADERS, frames.END_HEADERS, 3, BLOCK))
    server.out.take()
    events = server.feed(wrong)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].code == code
    last = server.out.take()[-1]
    assert last[3] == frames.GOAWAY
    assert int.from_bytes(last[13:17]) == code
    assert server.feed(frames.ping(bytes(8))) == []


def test_more_than_the_connections_window_in_parts() -> None:
    server = connection(connection_window=70_000, stream_window=100_000)
    server.feed(greeting() + OPEN + data(1, bytes(30_000), end=False))
    assert not server.over
    (end,) = server.feed(data(1, bytes(45_000)))
    assert isinstance(end, ConnectionEnded)
    assert end.code is ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("first", [frames.ping(bytes(8)), frame(frames.SETTINGS, frames.ACK, 0), OPEN])
def test_settings_come_first(first: bytes) -> None:
    (end,) = connection().feed(frames.PREFACE + first)
    assert isinstance(end, ConnectionEnded)
    assert end.code is ErrorCode.PROTOCOL_ERROR


STREAM_ERRORS = {
    "data after the end": (ErrorCode.STREAM_CLOSED, CLOSED + data(1, b"1")),
    "trailers after the end": (ErrorCode.STREAM_CLOSED, CLOSED + frame(frames.HEADERS, END_BOTH, 1, b"")),
    "trailers that do not end": (ErrorCode.PROTOCOL_ERROR, OPEN + frame(frames.HEADERS, 4, 1, b"")),
    "pseudo-header in trailers": (ErrorCode.PROTOCOL_ERROR, OPEN + frame(frames.HEADERS, END_BOTH, 1, b"\x83")),
    "window by nothing": (ErrorCode.PROTOCOL_ERROR, OPEN + frames.window_update(1, 0)),
    "window too large": (ErrorCode.FLOW_CONTROL_ERROR, OPEN + frames.window_update(1, 2**31 - 1)),
    "more than the window": (ErrorCode.FLOW_CONTROL_ERROR, OPEN + data(1, bytes(101))),
    "more than the window in parts": (
        ErrorCode.FLOW_CONTROL_ERROR,
        OPEN + data(1, bytes(60), end=False) + data(1, bytes(41)),
    ),
    "priority of a wrong size": (ErrorCode.FRAME_SIZE_ERROR, OPEN + frame(frames.PRIORITY, 0, 1, bytes(4))),
    "capitals": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("Name", "x"))),
    "a blank in a name": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("na me", "x"))),
    "a line's end": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("name", "x\r\ny"))),
    "a tab at the end": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("name", "x\t"))),
    "a blank at the end": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("content-length", "1 "))),
    "a blank before a path": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[:2], (":path", " /x"), FIELDS[3])),
    "connection": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("connection", "close"))),
    "te": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS, ("te", "gzip"))),
    "twice": (ErrorCode.PROTOCOL_ERROR, wrong_block(FIELDS[0], *FIELDS)),
    "late": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[1:], FIELDS[0])),
    "unknown": (ErrorCode.PROTOCOL_ERROR, wrong_block((":status", "200"), *FIELDS)),
    "no path": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[:2])),
    "no method": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[1:])),
    "no scheme": (ErrorCode.PROTOCOL_ERROR, wrong_block(FIELDS[0], *FIELDS[2:])),
    "an empty path": (ErrorCode.PROTOCOL_ERROR, wrong_block(*FIELDS[:2], (":path", ""), FIELDS[3])),
    "paths": (ErrorCode.PROTOCOL_ERROR, wrong_block((":path", "/b"), *FIELDS)),
    "an unknown pseudo-header": (ErrorCode.PROTOCOL_ERROR, wrong_block((":name", "x"), *FIELDS)),
    "nothing": (ErrorCode.PROTOCOL_ERROR, wrong_block()),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_errors(name: str) -> None:
    code, wrong = STREAM_ERRORS[name]
    server = connection(stream_window=100)
    server.feed(greeting())
    server.out.take()
    events = server.feed(wrong)
    assert frames.rst_stream(1, code) in server.out.take()
    assert not any(isinstance(event, ConnectionEnded) for event in events)
    began = any(isinstance(event, RequestReceived) for event in events)
    assert any(isinstance(event, StreamReset) and event.by_us for event in events) == began
    # Others go on, and what was on its way to the stream is dropped.
    events = server.feed(frames.rst_stream(1, ErrorCode.CANCEL) + frame(frames.HEADERS, END_BOTH, 3, BLOCK))
    assert [event.stream for event in events if isinstance(event, RequestReceived)] == [3]


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=10))
def test_any_fields_are_a_head_or_malformed(fields: list[tuple[bytes, bytes]]) -> None:
    good = [(name.encode(), value.encode()) for name, value in FIELDS]
    for several in (fields, good + fields, [*good, *((b"x-bin", value) for _, value in fields)]):
        try:
            head = read_head(classified(several))
        except MalformedRequest:
            continue
        assert head.path
