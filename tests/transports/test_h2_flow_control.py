"""What the HTTP/2 core counts of its client's windows: exactly what came and what was given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tests.transports.h2_core import BLOCK, connection, joined
from tests.transports.h2_peers import data, frame, greeting, message
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import BULK_BYTES, READ_BYTES, Connection
from triglot.transports.http2.core.events import ConnectionEnded, DataPlaced, StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import RequestReceived
from triglot.transports.http2.messages import IN_PLACE_BYTES, MessageReader

STREAM, ALL = 150_000, 400_000
NUMBERS = (1, 3, 5)


class Sending:
    """A client that knows its windows by frames, and the core, whose owner gives room back at once."""

    def __init__(self, cuts: list[int]) -> None:
        self.core: Connection = connection(stream_window=STREAM, connection_window=ALL)
        self.readers = {number: MessageReader(10**7, lambda size, _: self._memory(size)) for number in NUMBERS}
        self.room = Counter({0: frames.DEFAULT_WINDOW})
        self.received: Counter[int] = Counter()
        self.endings: list[object] = []
        self._cuts = cuts
        self._turn = 0
        self.send(greeting())
        for number in NUMBERS:
            self.room[number] = STREAM
            self.send(frame(frames.HEADERS, frames.END_HEADERS, number, BLOCK))

    @staticmethod
    def _memory(size: int) -> tuple[memoryview, memoryview]:
        room = memoryview(bytearray(size))
        return room, room.toreadonly()

    def _pieces(self, sent: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(sent):
            self._turn += 1
            size = self._cuts[self._turn % len(self._cuts)]
            yield sent[at : at + size]
            at += size

    def send(self, sent: bytes) -> None:
        for piece in self._pieces(sent):
            for event in joined(self.core.feed(piece)):
                if isinstance(event, RequestReceived):
                    self.core.receive_into(event.stream, self.readers[event.stream])
                elif isinstance(event, DataPlaced):
                    self._consumed(event.stream, event.size)
                elif isinstance(event, ConnectionEnded | StreamReset):
                    self.endings.append(event)
                else:
                    self.readers[event.stream].feed(memoryview(event.data))
                    self._consumed(event.stream, len(event.data))
        self._read()

    def _consumed(self, number: int, size: int) -> None:
        self.received[number] += size
        self.core.consumed(number, size)

    def _read(self) -> None:
        sent, at = b"".join(self.core.out.take()), 0
        while at < len(sent):
            length, kind = int.from_bytes(sent[at : at + 3]), sent[at + 3]
            if kind == frames.WINDOW_UPDATE:
                self.room[int.from_bytes(sent[at + 5 : at + 9])] += int.from_bytes(sent[at + 9 : at + 13])
            at += frames.HEAD_BYTES + length


FRAMES = st.lists(
    st.tuples(
        st.sampled_from(NUMBERS), st.integers(1, 40_000) | st.integers(1, 9), st.sampled_from([0, 0, 1, 99])
    ),
    max_size=40,
)
CUTS = st.lists(st.sampled_from([1009, 16_393, READ_BYTES, BULK_BYTES, 10**7]), min_size=1, max_size=4)
MESSAGES = st.lists(st.integers(0, 50) | st.integers(IN_PLACE_BYTES, 5 * IN_PLACE_BYTES), min_size=1, max_size=3)


@given(FRAMES, MESSAGES, CUTS, st.sampled_from(NUMBERS))
def test_a_client_may_send_what_it_has_room_for_and_no_byte_more(
    sent: list[tuple[int, int, int]], sizes: list[int], cuts: list[int], last: int
) -> None:
    client = Sending(cuts)
    endless = b"".join(message(b"x" * size) for size in sizes) * (1 + 2_000_000 // (5 + sum(sizes)))
    at: Counter[int] = Counter()
    burst = b""
    for number, size, padding in sent:
        cost = size + padding
        if cost > min(client.room[number], client.room[0]):
            client.send(burst)
            burst = b""
        cost = min(cost, client.room[number], client.room[0])
        assert cost > padding, "no room came back for what was read"
        part = endless[at[number] : at[number] + cost - padding]
        at[number] += len(part)
        client.room[number] -= cost
        client.room[0] -= cost
        burst += (
            frame(frames.DATA, frames.PADDED, number, bytes([padding - 1]) + part + bytes(padding - 1))
            if (padding)
            else data(number, part, end=False)
        )
    client.send(burst)
    assert client.received == at
    assert not client.endings
    assert client.room[0] > ALL // 2  # What was received is of no more account.
    room = min(client.room[0], client.room[last])
    client.send(data(last, bytes(room + 1), end=False))
    (ending,) = client.endings
    if client.room[0] == room:
        assert isinstance(ending, ConnectionEnded)
        assert ending.code is ErrorCode.FLOW_CONTROL_ERROR
    else:
        assert isinstance(ending, StreamReset)
        assert ending.code == ErrorCode.FLOW_CONTROL_ERROR
