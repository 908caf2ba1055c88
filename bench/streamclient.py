"""A load client for bidirectional gRPC: one stream, with a number of requests sent ahead of their responses."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence

from bench.h2client import Framed, H2Connection, OpenCall, framed_requests, headers_of
from bench.h2frames import DATA, END_STREAM, FRAME, frame
from bench.headers import HeaderBlocks
from bench.tally import BenchError, Request, Tally

PREFIX = 5
"""Bytes of gRPC's prefix before each message."""


class StreamConnection(H2Connection):
    """Sends the next request when a response arrives; responses arrive in order, and must match their requests.

    `in_flight` is the number of requests without a response. If requests name no parts of their responses, these
    must have the expected size, and the first one of a run is compared byte by byte.
    """

    def __init__(self, requests: Iterator[Framed], in_flight: int, headers: HeaderBlocks) -> None:
        super().__init__(requests, in_flight, headers)
        self.sent: deque[tuple[float, Request]] = deque()
        """Requests without a response so far, with the times when they were sent."""
        self.owed = 0
        """Number of requests that wait for the server's windows."""
        self.next: Framed = next(requests)
        self.call: OpenCall | None = None
        self.first = False
        """Whether the next response is the first one of a run."""

    def begin(self, tally: Tally) -> None:
        """Open the stream, and send the first requests."""
        if self.transport.is_closing():
            raise BenchError("the server closed the connection")
        self.tally = tally
        tally.open_slots += 1
        self.call = self._open()
        self.call.kept = bytearray()
        self.first = True
        self.sent.clear()
        self.owed = self.in_flight
        self._pump()
        self._flush()

    def _pump(self) -> None:
        call = self.call
        while self.owed and call is not None and not self.paused:
            request, body = self.next
            size = len(body)
            if size > min(self.window, call.window):
                break
            self.next = next(self.requests)
            self.owed -= 1
            self.window -= size
            call.window -= size
            self.out += (FRAME.pack(size << 8 | DATA, 0, call.stream), body)
            self.sent.append((time.perf_counter(), request))

    def _data(self, stream: int, size: int, pos: int, end: int) -> int:
        after = super()._data(stream, size, pos, end)
        call, tally = self.call, self.tally
        if call is None or tally is None or call.stream != stream or call.kept is None:
            return after
        kept, at = call.kept, 0
        now = time.perf_counter()
        while self.sent and len(kept) >= at + PREFIX:
            stop = at + PREFIX + int.from_bytes(kept[at + 1 : at + PREFIX], "big")
            if stop > len(kept):
                break
            sent, request = self.sent.popleft()
            if wrong := self._wrong_answer(request, kept[at:stop], tally.expected):
                self._abort(wrong)
                return after
            at = stop
            tally.latencies.append(now - sent)
            self.owed += now < tally.deadline
        del kept[:at]
        self._pump()
        if not self.sent and not self.owed:
            self.out.append(frame(DATA, END_STREAM, stream))
        return after

    def _wrong_answer(self, request: Request, answer: bytearray, expected: bytes) -> str:
        first, self.first = self.first, False
        if request.holds:
            return request.missing(answer)
        if len(answer) != len(expected):
            return f"an answer of {len(answer)} bytes in place of {len(expected)}"
        if first and answer != expected:
            return f"the first answer is {bytes(answer[:200])!r}, not {expected[:200]!r}"
        return ""

    def _finish(self, stream: int) -> None:
        """Handle trailers, which are correct if no response is missing or superfluous."""
        call, tally = self.calls.pop(stream, None), self.tally
        if call is None or tally is None:
            return
        self.call = None
        if self.sent or self.owed or call.kept:
            missing, left = len(self.sent) + self.owed, len(call.kept or b"")
            tally.wrong(f"the stream ended with {missing} answers missing and {left} bytes left over")
        else:
            tally.close_slot()


async def connect(
    port: int, path: str, requests: Sequence[Request], in_flight: int, *, indexed: bool = False
) -> StreamConnection:
    """Open a connection to a local server; `indexed` as in `HeaderBlocks`."""
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: StreamConnection(framed_requests(requests), in_flight, headers_of(port, path, indexed)),
        "127.0.0.1",
        port,
    )
    try:
        async with asyncio.timeout(10):
            await connection.ready
    except TimeoutError:
        connection.close()
        raise BenchError("no HTTP/2 SETTINGS from the server within 10 s") from None
    return connection
