"""A load client of bidirectional gRPC streams: one stream, with so many messages sent ahead of their answers."""

import asyncio
import time
from collections import deque

from bench.h2client import H2Connection, OpenCall
from bench.h2frames import DATA, END_STREAM, FRAME, frame
from bench.tally import BenchError, Tally


class StreamConnection(H2Connection):
    """Sends the next message when an answer comes; answers must have the expected size, and come in order.

    `in_flight` is how many messages wait for an answer. The first answer of a run is compared byte by byte.
    """

    def __init__(self, path: str, message: bytes, in_flight: int, authority: str) -> None:
        super().__init__(path, message, in_flight, authority)
        self.sent: deque[float] = deque()
        """When the messages went out that are not answered yet."""
        self.owed = 0
        """Messages that wait for the server's windows."""
        self.call: OpenCall | None = None

    def begin(self, tally: Tally) -> None:
        """Open the stream, and send the first messages."""
        if self.transport.is_closing():
            raise BenchError("the server closed the connection")
        self.tally = tally
        self.expected_size = len(tally.expected)
        tally.open_slots += 1
        number = self.next_stream
        self.next_stream = number + 2
        self.call = self.calls[number] = OpenCall(number, time.perf_counter(), self.initial_window)
        self.call.kept = bytearray()
        self.sent.clear()
        self.out += (self.headers_head, number.to_bytes(4, "big"), self.block)
        self.owed = self.in_flight
        self._pump()
        self._flush()

    def _pump(self) -> None:
        size, call = len(self.body), self.call
        while self.owed and call is not None and not self.paused and size <= min(self.window, call.window):
            self.owed -= 1
            self.window -= size
            call.window -= size
            self.out += (FRAME.pack(size << 8 | DATA, 0, call.stream), self.body)
            self.sent.append(time.perf_counter())

    def _data(self, stream: int, size: int, pos: int, end: int) -> int:
        after = super()._data(stream, size, pos, end)
        call, tally = self.call, self.tally
        if call is None or tally is None or call.stream != stream:
            return after
        if call.kept is not None and call.received >= self.expected_size:
            if call.kept[: self.expected_size] != tally.expected:
                self._abort(f"the first answer is {bytes(call.kept[:200])!r}, not {tally.expected[:200]!r}")
                return after
            call.kept = None
        now = time.perf_counter()
        while call.received >= self.expected_size and self.sent:
            call.received -= self.expected_size
            tally.latencies.append(now - self.sent.popleft())
            self.owed += now < tally.deadline
        self._pump()
        if not self.sent and not self.owed:
            self.out.append(frame(DATA, END_STREAM, stream))
        return after

    def _finish(self, stream: int) -> None:
        """Trailers: good when nothing is missing, and nothing was too much."""
        call, tally = self.calls.pop(stream, None), self.tally
        if call is None or tally is None:
            return
        self.call = None
        if self.sent or self.owed or call.received:
            missing = len(self.sent) + self.owed
            tally.wrong(f"the stream ended with {missing} answers missing and {call.received} bytes left over")
        else:
            tally.close_slot()


async def connect(port: int, path: str, message: bytes, in_flight: int) -> StreamConnection:
    """A connection to a local server."""
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: StreamConnection(path, message, in_flight, f"127.0.0.1:{port}"), "127.0.0.1", port
    )
    try:
        async with asyncio.timeout(10):
            await connection.ready
    except TimeoutError:
        connection.close()
        raise BenchError("no HTTP/2 SETTINGS from the server within 10 s") from None
    return connection
