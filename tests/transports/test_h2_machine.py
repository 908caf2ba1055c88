"""The HTTP/2 core and hyper's `h2` as its client, in any order of what both may do, bytes under way all the time.

Strategy: whatever happened, at the end both sides finish what they have begun, and the client gives all the room
there is: what one side sent has come on the other, and nothing is left. That no window is overrun, and no frame
sent that the state of its stream forbids, is what hyper's side looks after.
"""

from __future__ import annotations

from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.transports.h2_core import Part, joined
from tests.transports.h2_peers import pairs_of
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import ConnectionEnded, RequestEnded, StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived

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
WINDOWS = st.sampled_from([0, 100, 5_000, 65_535, 1_000_000])
SIZES = st.integers(0, 300) | st.sampled_from([16_384, 16_385, 40_000, 200_000])
ANY = st.integers(0, 1000)


class Exchange:
    """A stream, as a bystander knows it who sees both sides."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.sent_all = False
        self.received = bytearray()
        self.received_all = False
        self.unread = 0
        """What the server has received, and not given the room of back."""
        self.answer: bytes | None = None
        self.answered = bytearray()
        self.answered_all = False
        self.reset = False


class Pair(RuleBasedStateMachine):
    """Both ends, the bytes between them, and the streams by number."""

    def __init__(self) -> None:
        super().__init__()
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.client = h2.connection.H2Connection(config)
        self.client.initiate_connection()
        limits = Limits(stream_window=70_000, connection_window=150_000, max_streams=1000, abuse_budget=1e9)
        self.server = Connection(limits)
        self.to_server, self.to_client = bytearray(), bytearray()
        self.streams: dict[int, Exchange] = {}
        self.untaken: dict[int, int] = {}
        self.settings_under_way = True  # Those of the greeting.
        self.complete_requests = 0
        """Requests that came at once."""
        self.carry_all()

    # --- bytes ---

    def collect(self) -> None:
        self.to_server += self.client.data_to_send()
        self.to_client += b"".join(self.server.out.take())

    @rule(count=st.integers(1, 60) | st.integers(1, 100_000))
    def carry_to_server(self, count: int) -> None:
        self.collect()
        part = bytes(self.to_server[:count])
        del self.to_server[:count]
        for event in joined(self.server.feed(part)):
            self.at_server(event)

    @rule(count=st.integers(1, 10))
    def carry_to_client(self, count: int) -> None:
        """So many frames, one by one: hyper's side uses new settings from the next bytes on that it is given."""
        self.collect()
        while self.to_client and count:
            size = frames.HEAD_BYTES + int.from_bytes(self.to_client[:3])
            frame = bytes(self.to_client[:size])
            del self.to_client[:size]
            for event in self.client.receive_data(frame):
                self.at_client(event)
            count -= 1

    @rule()
    def carry_all(self) -> None:
        self.collect()
        while self.to_server or self.to_client:
            self.carry_to_server(len(self.to_server) or 1)
            self.carry_to_client(1_000_000)
            self.collect()

    # --- what arrives ---

    def at_server(self, event: Any) -> None:
        assert not isinstance(event, ConnectionEnded), event.text
        stream = self.streams[event.stream] if hasattr(event, "stream") else None
        if isinstance(event, RequestReceived | CompleteRequest):
            assert stream is not None
            assert dict(pairs_of(event.headers.fields)) == {
                name.encode(): value.encode() for name, value in REQUEST
            }
            if isinstance(event, CompleteRequest):
                self.complete_requests += 1
                stream.received += event.body
            stream.received_all = isinstance(event, CompleteRequest) or event.end_stream
        elif isinstance(event, Part):
            assert stream is not None
            stream.received += event.data
            stream.unread += len(event.data)
            stream.received_all = event.end_stream
        elif isinstance(event, RequestEnded):
            assert stream is not None
            stream.received_all = True
        elif isinstance(event, StreamReset):
            assert stream is not None
            assert stream.reset, "nobody has"

    def at_client(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.streams[event.stream_id].answered += event.data
            if event.flow_controlled_length:
                self.untaken[event.stream_id] = self.untaken.get(event.stream_id, 0) + event.flow_controlled_length
        elif isinstance(event, h2.events.TrailersReceived):
            self.streams[event.stream_id].answered_all = True
        elif isinstance(event, h2.events.StreamReset):
            assert self.streams[event.stream_id].reset or event.error_code == ErrorCode.NO_ERROR
            self.streams[event.stream_id].reset = True
        elif isinstance(event, h2.events.SettingsAcknowledged):
            self.settings_under_way = False
        else:
            assert not isinstance(event, h2.events.ConnectionTerminated)

    # --- the client's side ---

    def sending(self, which: int) -> int | None:
        """A stream on which the client has not sent all."""
        numbers = [number for number, stream in self.streams.items() if not stream.sent_all and not stream.reset]
        return numbers[which % len(numbers)] if numbers else None

    @rule(body=st.booleans())
    def begin(self, body: bool) -> None:
        if len(self.server.streams) >= 15:
            return
        number = self.client.get_next_available_stream_id()
        self.streams[number] = exchange = Exchange()
        self.client.send_headers(number, REQUEST, end_stream=not body)
        exchange.sent_all = not body

    @rule(which=ANY, size=SIZES, padding=st.none() | st.integers(0, 255), end=st.booleans())
    def send(self, which: int, size: int, padding: int | None, end: bool) -> None:
        number = self.sending(which)
        if number is None:
            return
        room = min(self.client.local_flow_control_window(number), self.client.max_outbound_frame_size)
        size = min(size, room - (0 if padding is None else padding + 1))
        if size < 0:
            return
        self.send_part(number, (str(which) * size).encode()[:size], end, padding)

    def send_part(self, number: int, part: bytes, end: bool, padding: int | None = None) -> None:
        self.client.send_data(number, part, end_stream=end, pad_length=padding)
        self.streams[number].sent += part
        self.streams[number].sent_all = end

    @rule(which=ANY)
    def end_with_trailers(self, which: int) -> None:
        number = self.sending(which)
        if number is not None:
            self.client.send_headers(number, [("a", "b")], end_stream=True)
            self.streams[number].sent_all = True

    @rule(which=ANY)
    def cancel(self, which: int) -> None:
        numbers = [
            number for number, stream in self.streams.items() if not stream.reset and not stream.answered_all
        ]
        if numbers:
            number = numbers[which % len(numbers)]
            self.client.reset_stream(number, ErrorCode.CANCEL)
            self.streams[number].reset = True

    @rule(
        window=WINDOWS,
        largest=st.sampled_from([16_384, 20_000, 100_000]),
        table=st.sampled_from([0, 100, 4096, 65_536]),
    )
    def change_settings(self, window: int, largest: int, table: int) -> None:
        if self.settings_under_way:
            return  # With the first acknowledgement, hyper's side would use parts of the second ones.
        codes = h2.settings.SettingCodes
        self.client.update_settings(
            {codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: largest, codes.HEADER_TABLE_SIZE: table}
        )
        self.settings_under_way = True

    @rule(which=ANY, share=st.floats(0.1, 1))
    @precondition(lambda self: self.untaken)
    def take(self, which: int, share: float) -> None:
        number = list(self.untaken)[which % len(self.untaken)]
        count = max(1, int(self.untaken[number] * share))
        self.client.acknowledge_received_data(count, number)
        self.untaken[number] -= count
        if not self.untaken[number]:
            del self.untaken[number]

    # --- the server's ---

    def waiting(self, which: int) -> int | None:
        """A stream that the server has not answered."""
        numbers = [number for number in self.server.streams if self.streams[number].answer is None]
        return numbers[which % len(numbers)] if numbers else None

    @rule(which=ANY, size=SIZES, parts=st.integers(0, 3))
    def answer(self, which: int, size: int, parts: int) -> None:
        number = self.waiting(which)
        if number is None:
            return
        body = self.streams[number].answer = (str(number) * size).encode()[:size]
        out = self.server.out
        if not parts:
            out.respond(number, HEADERS, [body], size, TRAILERS)
        else:
            out.headers(number, HEADERS)
            cut = size // parts
            for part in range(parts):
                out.data(number, [body[part * cut : None if part == parts - 1 else (part + 1) * cut]])
            out.trailers(number, TRAILERS)

    @rule(which=ANY)
    def give_room(self, which: int) -> None:
        numbers = [number for number, stream in self.streams.items() if stream.unread]
        if numbers:
            number = numbers[which % len(numbers)]
            self.server.consumed(number, self.streams[number].unread)
            self.streams[number].unread = 0

    @rule(which=ANY)
    def give_up(self, which: int) -> None:
        number = self.waiting(which)
        if number is not None:
            self.server.reset(number, ErrorCode.CANCEL)
            self.streams[number].reset = True

    @rule(paused=st.booleans())
    def hold(self, paused: bool) -> None:
        if paused:
            self.server.out.pause()
        else:
            self.server.out.resume()

    # --- the end ---

    def teardown(self) -> None:
        self.server.out.resume()
        self.finish()
        # Room on each stream first, then for all of them: no settings, which would look at everything anew.
        open_still = [
            number for number, stream in self.streams.items() if not (stream.reset or stream.answered_all)
        ]
        for number in open_still:
            self.client.increment_flow_control_window(1_000_000, number)
            self.carry_all()
        self.client.increment_flow_control_window(100_000_000)
        self.finish()
        for number, stream in self.streams.items():
            if not stream.reset:
                assert stream.received == stream.sent, number
                assert stream.received_all
                assert bytes(stream.answered) == stream.answer
                assert stream.answered_all
        assert self.server.streams == {}
        assert self.server.out.unsent == 0

    def finish(self) -> None:
        """What has begun: requests are sent to their ends, taken and answered."""
        while True:
            self.carry_all()
            while self.untaken:
                self.take(0, 1.0)
            for which in range(len(self.streams)):
                self.give_room(which)
            if (number := self.sending(0)) is not None:
                self.client.end_stream(number)
                self.streams[number].sent_all = True
            elif self.waiting(0) is not None:
                self.answer(0, 300, 0)
            elif not self.untaken and not self.under_way():
                return

    def under_way(self) -> bool:
        self.collect()
        return bool(self.to_server or self.to_client)


Pair.TestCase.settings = settings(stateful_step_count=60)
TestAnyOrder = Pair.TestCase


def test_an_answer_of_no_bytes() -> None:
    pair = Pair()
    pair.begin(body=False)
    pair.carry_all()
    pair.answer(0, 0, 0)
    pair.carry_all()
    assert not pair.untaken
    pair.teardown()


@given(
    st.lists(st.binary(max_size=300), min_size=3, max_size=15),
    st.sampled_from([100_000, 100, 7]),
    st.booleans(),
    st.integers(1, 3),
)
def test_complete_requests(bodies: list[bytes], size: int, heads_first: bool, frames_each: int) -> None:
    pair = Pair()
    parts = []
    for number, body in zip(range(1, 2 * len(bodies), 2), bodies, strict=True):
        cut = -(-len(body) // frames_each)
        parts += [(number, body[at * cut : (at + 1) * cut], at == frames_each - 1) for at in range(frames_each)]
    for number in range(1, 2 * len(bodies), 2):
        pair.begin(body=True)
        # All heads come first as nghttp2 sends requests that are made together.
        while parts and not heads_first and parts[0][0] == number:
            pair.send_part(*parts.pop(0))
    for part in parts:
        pair.send_part(*part)
    pair.collect()
    while pair.to_server:
        pair.carry_to_server(size)
    assert size < 100_000 or pair.complete_requests == (len(bodies) if frames_each == 1 else 0)
    pair.teardown()
