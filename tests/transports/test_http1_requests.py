"""The core of HTTP/1.1, a function of bytes: what is read does not depend on how it came; nothing is smuggled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.transports.http1.requests import (
    MAX_LAYOUTS,
    BodyPart,
    Event,
    HeadLayouts,
    Malformed,
    RequestEnded,
    RequestHead,
    RequestReader,
    blank_line,
    encode_chunk,
    response_head,
)
from triglot.transports.rest.fields import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES

HOST = b"Host: a\r\n"
GET = b"GET /x HTTP/1.1\r\n"
POST = b"POST /x HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def read(parts: Sequence[bytes], layouts: HeadLayouts | None = None) -> list[Event]:
    """All events, each request's when it is its turn; the parts of one body as one."""
    reader = RequestReader(layouts or HeadLayouts())
    events: list[Event] = []
    for part in parts:
        events += reader.receive(part)
        while reader.kept and reader.waits and not (events and isinstance(events[-1], Malformed)):
            events += reader.next_request()
    return list(_joined(events))


def _joined(events: list[Event]) -> Iterator[Event]:
    body = b""
    for event in events:
        if isinstance(event, BodyPart):
            body += event.data
            continue
        if body:
            yield BodyPart(body)
            body = b""
        yield event
    if body:
        yield BodyPart(body)


def cut(text: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(text[:size])
        text = text[size:]
    return [*parts, text]


def sized(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(parts: list[bytes], trailer: bytes = b"") -> bytes:
    return CHUNKED + b"".join(encode_chunk(part) for part in parts if part) + b"0\r\n" + trailer + b"\r\n"


NEWLINES = st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"x", b"0\r\n"]), max_size=8).map(
    b"".join
)
BODIES = st.one_of(st.binary(max_size=60), NEWLINES)
REQUESTS = st.one_of(
    st.just(GET + HOST + b"\r\n"),
    st.just(b"\r\n" + GET + HOST + b"X: \xc3\xa9 \t\r\nX: 2\r\n\r\n"),
    st.just(GET + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"),
    BODIES.map(sized),
    st.lists(BODIES, max_size=4).map(chunked),
    st.lists(BODIES, max_size=2).map(lambda parts: chunked(parts, b"A: b\r\nC: d\r\n")),
)
WRONG = st.sampled_from(
    [
        b"",
        b"FOO / HTTP/1.1\r\n\r\n",
        GET + b"junk\r\n\r\n",
        CHUNKED + b"3\r\nabcd\r\n",
        CHUNKED + b"zz\r\n",
        b"\x16\x03",
    ]
)
SIZES = st.lists(st.integers(1, 40), max_size=80)


@given(st.lists(REQUESTS, max_size=5), WRONG, SIZES)
def test_what_is_read_does_not_depend_on_how_it_comes(
    requests: list[bytes], wrong: bytes, sizes: list[int]
) -> None:
    text = b"".join(requests) + wrong
    events = read([text])
    split = read(cut(text, sizes))
    assert [_without_quotes(event) for event in split] == [_without_quotes(event) for event in events]
    assert sum(isinstance(event, RequestEnded) for event in events) == len(requests)


def _without_quotes(event: Event) -> Event:
    # The line is quoted where all of it is at hand.
    return Malformed(event.text.partition(": ")[0]) if isinstance(event, Malformed) else event


@given(st.lists(BODIES, max_size=6), SIZES)
def test_bodies_come_back(bodies: list[bytes], sizes: list[int]) -> None:
    text = b"".join(sized(body) + chunked([body]) for body in bodies)
    got: list[bytes] = []
    for event in read(cut(text, sizes)):
        if isinstance(event, RequestHead):
            got.append(b"")
        elif isinstance(event, BodyPart):
            got[-1] += event.data
    assert got == [body for body in bodies for _ in range(2)]


@given(st.binary(max_size=400), SIZES)
def test_any_bytes_are_survived(data: bytes, sizes: list[int]) -> None:
    for before in (b"", CHUNKED, GET + HOST):
        read(cut(before + data, sizes))


@given(st.binary(max_size=8), NEWLINES)
def test_where_a_blank_line_ends(before: bytes, data: bytes) -> None:
    tail = before[-3:]
    end = (tail + data).find(b"\r\n\r\n")
    assert blank_line(tail, data) == (len(data) if end < 0 else end + 4 - len(tail))


FIELDS = {
    b"Content-Length: ": [b"5", b"05", b"+5", b"5 ", b"4", b"1" * 19, b""],
    b"x-id: ": [b"a", b"a b", b" a", b"a\t", b"a\r\n b", b"\xc3\xa9", b"\x00", b"\x7f", b"5"],
    b"X-Id:": [b"a", b" a", b""],
    b"Connection: ": [b"close", b"keep-alive", b"Upgrade", b"a"],
    b"Transfer-Encoding: ": [b"chunked", b"gzip"],
    b"Upgrade: ": [b"h2c", b"a"],
}
"""Names, and values that are read in different ways."""
FIRST = st.sampled_from(
    [GET, POST.removesuffix(HOST), b"POST /x HTTP/1.0\r\n", b"CONNECT a HTTP/1.1\r\n", b"POST /y  HTTP/1.1\r\n"]
)
NAMES = st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3, unique=True)


@given(st.data(), FIRST, NAMES)
def test_head_by_layout_equals_parsed_head(data: st.DataObject, first: bytes, names: list[bytes]) -> None:
    layouts = HeadLayouts()
    for _ in range(6):
        lines = [name + data.draw(st.sampled_from(FIELDS[name])) + b"\r\n" for name in names]
        text = first + HOST + b"".join(lines) + b"\r\n12345"
        assert read([text], layouts) == read([text])


@given(st.binary(max_size=12), st.integers(0, 80), st.integers(0, 12))
def test_changed_bytes_of_a_known_head_are_read_as_ever(new: bytes, at: int, removed: int) -> None:
    layouts = HeadLayouts()
    text = POST + b"Content-Length: 3\r\nConnection: close\r\nx-id: a\r\n\r\nabc"
    assert read([text], layouts) == read([text])
    changed = text[:at] + new + text[at + removed :]
    assert read([changed], layouts) == read([changed])


def test_head_with_other_plain_values_is_read_by_layout() -> None:
    layouts = HeadLayouts()
    text = b"POST /x HTTP/1.1\r\nhost: a\r\nContent-Length: %d\r\nid: %b\r\n\r\n"
    read([text % (3, b"a") + b"abc"], layouts)
    head = layouts.read(text % (12, b"b c"))
    fields = [("host", "a"), ("content-length", "12"), ("id", "b c")]
    assert head == RequestHead("POST", "/x", fields, 12, is_http10=False, keep_alive=True)
    assert layouts.read(text % (12, b"b\t")) is None


def test_layouts_are_bounded() -> None:
    layouts = HeadLayouts()
    texts = [b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(2 * MAX_LAYOUTS)]
    read(texts, layouts)
    assert [layouts.read(text) is not None for text in texts] == [False] * MAX_LAYOUTS + [True] * MAX_LAYOUTS
    large = b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"x" * 4096)
    read([large], layouts)
    assert layouts.read(large) is None


def test_nothing_is_read_before_its_turn() -> None:
    reader = RequestReader(HeadLayouts())
    text = sized(b"abc") + chunked([b"d"]) + GET + HOST + b"\r\n"
    assert reader.receive(text) == []
    assert [type(event) for event in reader.next_request()] == [RequestHead, BodyPart, RequestEnded]
    kept = reader.kept
    assert kept == len(text) - len(sized(b"abc"))
    assert reader.receive(b"more") == []
    assert reader.kept == kept + 4


def test_a_head() -> None:
    (got, end) = read([b"GET http://h/v2?a=b#c HTTP/1.1\r\nHost:h\r\nX-A:  1 \t\r\nx-a: \xff\r\n\r\n"])
    assert got == RequestHead(
        "GET", "http://h/v2?a=b#c", [("host", "h"), ("x-a", "1"), ("x-a", "\udcff")], 0, False, True
    )
    assert end == RequestEnded()


@pytest.mark.parametrize(
    ("lines", "is_old", "keep_alive"),
    [
        (b"HTTP/1.1\r\nHost: a\r\n", False, True),
        (b"HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", False, False),
        (b"HTTP/1.0\r\n", True, False),
        (b"HTTP/1.0\r\nConnection: keep-alive\r\n", True, True),
    ],
)
def test_who_stays(lines: bytes, is_old: bool, keep_alive: bool) -> None:
    got = read([b"GET / " + lines + b"\r\n"])[0]
    assert isinstance(got, RequestHead)
    assert (got.is_http10, got.keep_alive) == (is_old, keep_alive)


REFUSED = {
    "bare LF": GET + b"Host: a\nX: y\r\n\r\n",
    "bare LF at the end": GET + HOST + b"\n",
    "bare CR": GET + b"Host: a\rX: y\r\n\r\n",
    "a length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "one length twice": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n",
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\n",
    "a signed length": POST + b"Content-Length: +5\r\n\r\n",
    "a negative length": POST + b"Content-Length: -5\r\n\r\n",
    "an empty length": POST + b"Content-Length: \r\n\r\n",
    "an endless length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a blank before the colon": POST + b"Content-Length : 5\r\n\r\n",
    "a coding that is none": POST + b"Transfer-Encoding: xchunked\r\n\r\n",
    "chunks that are not last": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a folded line": GET + HOST + b"A: b\r\n c\r\n\r\n",
    "a folded first line": GET + b" Host: a\r\n\r\n",
    "two hosts": GET + HOST + HOST + b"\r\n",
    "no host": GET + b"\r\n",
    "a NUL": GET + HOST + b"A: \x00\r\n\r\n",
    "HTTP/2": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "a blank in a chunk's size": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "a prefix of a chunk's size": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a sign of a chunk's size": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "no chunk's size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk's size without end": CHUNKED + b"1" * 17 + b"\r\n",
    "a chunk that goes on": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk with LF": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "a chunk's data with LF": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "an extension with LF": CHUNKED + b"3;a\nabc\r\n0\r\n\r\n",
    "an end with LF": CHUNKED + b"3\r\nabc\r\n0\r\n\n",
    "a length in the trailers": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_others_may_read_in_another_way_is_refused(name: str, size: int) -> None:
    smuggled = GET + HOST + b"X-Smuggled: 1\r\n\r\n"
    text = REFUSED[name] + smuggled
    events = read([text[at : at + size] for at in range(0, len(text), size)])
    assert isinstance(events[-1], Malformed)
    assert events[-1].status == 400
    assert sum(isinstance(event, RequestHead) for event in events) <= 1
    assert not any(isinstance(event, RequestEnded) for event in events)


@pytest.mark.parametrize("size", [1000, 1_000_000])
@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /" + b"a" * (MAX_LINE_BYTES + 10), 414),
        (b"GET /" + b"a" * (MAX_LINE_BYTES + 10) + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (GET + HOST + b"A: " + b"b" * (MAX_LINE_BYTES + 10), 431),
        (GET + HOST + b"A: b\r\n" * MAX_FIELDS + b"\r\n", 431),
        (GET + HOST + (b"A: " + b"b" * 1500 + b"\r\n") * 100, 431),
        (b"\r\n" * MAX_HEAD_BYTES, 431),
        (CHUNKED + b"0\r\n" + (b"A: " + b"b" * 1000 + b"\r\n") * 200, 431),
        (CHUNKED + b"1;" + b"b" * 2 * MAX_HEAD_BYTES, 431),
    ],
)
def test_heads_and_trailers_are_bounded(text: bytes, status: int, size: int) -> None:
    events = read([text[at : at + size] for at in range(0, len(text), size)])
    assert isinstance(events[-1], Malformed)
    assert events[-1].status == status
    assert len(events[-1].text) < 300


@pytest.mark.parametrize(
    ("status", "length", "is_old", "keep_alive", "lines"),
    [
        (200, 5, False, True, ["HTTP/1.1 200 OK", "Content-Length: 5"]),
        (200, 5, False, False, ["HTTP/1.1 200 OK", "Content-Length: 5", "Connection: close"]),
        (200, 5, True, True, ["HTTP/1.0 200 OK", "Content-Length: 5", "Connection: keep-alive"]),
        (200, None, False, True, ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked"]),
        (200, None, True, False, ["HTTP/1.0 200 OK"]),
        (204, 0, False, True, ["HTTP/1.1 204 No Content"]),
        (799, 0, False, True, ["HTTP/1.1 799 ", "Content-Length: 0"]),
    ],
)
def test_heads_of_answers(
    status: int, length: int | None, is_old: bool, keep_alive: bool, lines: list[str]
) -> None:
    # Whoever made the answer has no say in its framing.
    fields = [("A", "b"), ("content-length", "7"), ("Transfer-Encoding", "x"), ("Connection", "x"), ("A", "é")]
    text = response_head(status, fields, "now", length=length, is_http10=is_old, keep_alive=keep_alive).decode()
    assert text.endswith("\r\n\r\n")
    got = text.split("\r\n")[:-2]
    assert got[0] == lines[0]
    assert sorted(got[1:]) == sorted([*lines[1:], "A: b", "A: é", "Date: now"])
