"""The HTTP/2 core against hyper's `h2` as the client: what is sent arrives, however the bytes are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from h2_core import Part, joined
from hypothesis import given
from hypothesis import strategies as st

from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import Drained
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived, RpcHead

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
HEADERS = b"\x88"  # :status 200, of the static table
TRAILERS = b"\x00\x0bgrpc-status\x010"


def client() -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    made.initiate_connection()
    return made


def cut(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = next(sizes)
        yield data[at : at + size]
        at += size


def send_body(client: h2.connection.H2Connection, stream: int, body: bytes, count: int) -> None:
    """In so many frames."""
    size = -(-len(body) // count)
    for number in range(1, count + 1):
        client.send_data(stream, body[(number - 1) * size : number * size], end_stream=number == count)


class Pair:
    """A client and the server's core, and what each has seen; bytes travel in pieces of the given sizes."""

    def __init__(self, sizes: list[int], limits: Limits | None = None) -> None:
        self.client = client()
        self.server = Connection(limits or Limits())
        self.bodies: dict[int, bytes] = {}
        self.asked: dict[int, RpcHead] = {}
        self.answers: dict[int, bytes] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.drained: list[int] = []
        self.complete_requests = 0
        """Requests that came at once."""
        self._sizes = sizes or [1 << 20]
        self._at = 0

    def _next_sizes(self) -> Iterator[int]:
        while True:
            self._at += 1
            yield self._sizes[self._at % len(self._sizes)]

    def run(self) -> None:
        """Until both are silent."""
        while True:
            to_server = self.client.data_to_send()
            for piece in cut(to_server, self._next_sizes()):
                for event in joined(self.server.feed(piece)):
                    self._seen_by_server(event)
            to_client = b"".join(self.server.out.take())
            for piece in cut(to_client, self._next_sizes()):
                for seen in self.client.receive_data(piece):
                    self._seen_by_client(seen)
            if not to_server and not to_client:
                return

    def _seen_by_server(self, event: Any) -> None:
        if isinstance(event, RequestReceived):
            self.asked[event.stream] = event.headers
            self.bodies[event.stream] = b""
            if event.end_stream:
                self._answer(event.stream)
        elif isinstance(event, Part):
            self.bodies[event.stream] += bytes(event.data)
            self.server.consumed(event.stream, len(event.data))
            if event.end_stream:
                self._answer(event.stream)
        elif isinstance(event, CompleteRequest):
            self.asked[event.stream] = event.headers
            self.bodies[event.stream] = event.body
            self.complete_requests += 1
            self._answer(event.stream)
        elif isinstance(event, Drained):
            self.drained.append(event.stream)
        else:
            raise AssertionError(event)

    def _answer(self, stream: int) -> None:
        body = self.bodies[stream]
        self.server.out.respond(stream, HEADERS, [body], len(body), TRAILERS)

    def _seen_by_client(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.answers[event.stream_id] = self.answers.get(event.stream_id, b"") + event.data
            if event.flow_controlled_length:
                self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            headers: Any = event.headers
            self.trailers[event.stream_id] = dict(headers)
        elif isinstance(event, h2.events.ConnectionTerminated | h2.events.StreamReset):
            raise AssertionError(event)


@given(
    bodies=st.lists(st.binary(max_size=300) | st.integers(0, 200_000).map(bytes), max_size=8),
    sizes=st.lists(st.integers(1, 50) | st.integers(1, 100_000), max_size=5),
    padding=st.integers(0, 255),
)
def test_bodies_come_and_go(bodies: list[bytes], sizes: list[int], padding: int) -> None:
    # Many bytes in small parts take long.
    pair = Pair([*sizes, 100_000] if sum(map(len, bodies)) > 10_000 else sizes)
    pair.run()
    streams = {}
    for body in bodies:
        stream = pair.client.get_next_available_stream_id()
        streams[stream] = body
        pair.client.send_headers(stream, REQUEST, end_stream=not body)
        at = 0
        while at < len(body):
            pair.run()
            room = min(pair.client.local_flow_control_window(stream), pair.client.max_outbound_frame_size) - 256
            assert room > 0
            part = body[at : at + room]
            at += len(part)
            pair.client.send_data(stream, part, end_stream=at == len(body), pad_length=padding or None)
    pair.run()
    assert pair.bodies == streams
    assert {stream: pair.answers.get(stream, b"") for stream in streams} == streams
    assert pair.trailers == {stream: {"grpc-status": "0"} for stream in streams}
    assert pair.server.streams == {}
    assert all(head.path == "/a.B/C" for head in pair.asked.values())


@given(
    st.lists(st.binary(max_size=300), min_size=3, max_size=20),
    st.sampled_from([[], [100], [7, 5000]]),
    st.booleans(),
    st.integers(1, 3),
)
def test_complete_requests(bodies: list[bytes], sizes: list[int], heads_first: bool, frames_each: int) -> None:
    pair = Pair(sizes)
    pair.run()
    streams = {}
    for body in bodies:
        stream = pair.client.get_next_available_stream_id()
        streams[stream] = body
        pair.client.send_headers(stream, REQUEST)
        if not heads_first:
            send_body(pair.client, stream, body, frames_each)
    for stream in sorted(streams) if heads_first else ():  # As nghttp2 sends requests that are made together.
        send_body(pair.client, stream, streams[stream], frames_each)
    pair.run()
    assert sizes or pair.complete_requests == (len(bodies) if frames_each == 1 else 0)
    assert pair.bodies == streams
    assert {stream: pair.answers.get(stream, b"") for stream in streams} == streams
    assert pair.server.streams == {}
