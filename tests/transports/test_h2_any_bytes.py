"""No bytes make the HTTP/2 core fail, and how they are cut makes no difference."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.transports.h2_core import BLOCK, CLOSED, OPEN, act, answered, connection, request
from tests.transports.h2_peers import data, frame, greeting, pairs_of
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.receiving import RequestReceived

KINDS = st.integers(0, 11)
PAYLOADS = st.binary(max_size=40) | st.sampled_from(
    [BLOCK, bytes(4), bytes(5), bytes(8), b"\x00\x04\x00\x00\x00\x05"]
)
ANY_FRAME = st.builds(frame, KINDS, st.integers(0, 255), st.integers(0, 9), PAYLOADS)
STREAMS = st.integers(0, 30).map(lambda number: 2 * number + 1)


GOOD_FRAME = (
    st.sampled_from([OPEN, CLOSED, data(1, b"12345", end=False), data(1, b"6"), frames.ping(bytes(8))])
    | st.builds(lambda stream: frame(frames.HEADERS, frames.END_HEADERS, stream, BLOCK), STREAMS)
    | st.builds(request, STREAMS, st.binary(max_size=9))
    | st.integers(0, 60).map(lambda more: b"".join(request(2 * at + 1, b"x" * at) for at in range(more)))
)


@given(st.lists(ANY_FRAME | GOOD_FRAME | st.binary(max_size=30), max_size=20), st.booleans())
def test_no_bytes_make_it_fail(parts: list[bytes], answers: bool) -> None:
    server = connection()
    server.feed(greeting())
    for part in parts:
        act(server, server.feed(part))
        if answers and not server.over:
            answered(server)
    sent = b"".join(server.out.take())
    assert server.over == (sent != b"" and _kinds(sent)[-1] == frames.GOAWAY)


def _kinds(sent: bytes) -> list[int]:
    at, kinds = 0, []
    while at < len(sent):
        kinds.append(sent[at + 3])
        at += frames.HEAD_BYTES + int.from_bytes(sent[at : at + 3])
    assert at == len(sent)
    return kinds


def comparable(events: list[Any]) -> list[Any]:
    return [
        (event.stream, pairs_of(event.headers.fields), event.end_stream)
        if isinstance(event, RequestReceived)
        else event
        for event in events
    ]


@given(st.lists(ANY_FRAME | GOOD_FRAME, max_size=20), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_any_cutting_is_the_same(parts: list[bytes], sizes: list[int]) -> None:
    uncut, cut = connection(), connection()
    stream = greeting() + b"".join(parts)
    expected = act(uncut, uncut.feed(stream))
    events: list[Any] = []
    at = turn = 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        events += cut.feed(stream[at : at + size])
        at += size
        turn += 1
    assert comparable(act(cut, events)) == comparable(expected)
    assert cut.streams.keys() == uncut.streams.keys()
    assert cut.over == uncut.over
