"""A gRPC load client on bare HTTP/2 (prior knowledge, no TLS).

Strategy: the bench is about the server's cost, so the client must be far cheaper than the server. A Python
grpc client costs as much per call as a Python grpc server: on two cores it would be the bottleneck, and two
servers of different cost would show the same throughput. So this client speaks only as much HTTP/2 as one
unary method needs. Requests are made beforehand and sent in turn; their header blocks are what gRPC's C-core
would write. A small request is one `join` of ready-made pieces; of a reply it reads only frame headers and data.
It obeys the server's frame size, both flow-control windows, PING and SETTINGS. It does not decode HPACK, so it
does not read statuses: a reply is correct when it contains the parts that its request names (`Request.holds`), and
then has trailers. For a request that names none, the reply must have exactly the expected number of bytes, and the
first one of each run must be equal byte by byte. An error is detected because it has no data before its trailers.
"""

import asyncio
import ssl
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from random import randrange
from typing import cast

from bench.h2frames import (
    ACK,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
    window_update,
)
from bench.headers import HeaderBlocks
from bench.tally import BenchError, Request, Tally

REPLENISH = 2**29  # replenish the connection's window in big steps: a WINDOW_UPDATE costs the server work
PIECE = 2**20  # bytes passed to the transport at once; also the most in one DATA frame
JOINED = 2**16  # DATA below this shares a write with its frame header; above, a copy costs more than a write
BUFFER = 2**20


Framed = tuple[Request, memoryview]
"""A request, and its message with gRPC's prefix."""


def framed_requests(requests: Sequence[Request]) -> Iterator[Framed]:
    """Yield the requests in turn, forever, beginning at a random one."""
    framed = [
        (request, memoryview(b"\0" + len(request.body).to_bytes(4, "big") + request.body)) for request in requests
    ]
    return islice(cycle(framed), randrange(len(framed)), None)


class OpenCall:
    """One open stream, with the progress of its request and its reply."""

    __slots__ = ("body", "kept", "offset", "received", "request", "started", "stream", "window")

    def __init__(self, stream: int, request: Request, body: memoryview, started: float, window: int) -> None:
        self.stream = stream
        self.request = request
        self.body = body  # with gRPC's prefix
        self.started = started
        self.window = window  # bytes that the server still allows on this stream
        self.offset = 0  # how much of the body is sent
        self.received = 0
        self.kept = bytearray() if request.holds else None  # the reply, if its content is checked


class H2Connection(asyncio.BufferedProtocol):
    """A connection that keeps `in_flight` calls open during a run. On the event loop."""

    def __init__(self, requests: Iterator[Framed], in_flight: int, headers: HeaderBlocks) -> None:
        self.requests = requests
        self.in_flight = in_flight
        self.headers = headers
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tally: Tally | None = None
        self.expected_size = 0
        self.calls: dict[int, OpenCall] = {}
        self.next_stream = 1
        self.sending: list[OpenCall] = []  # calls whose body is not sent completely, oldest first
        self.out: list[bytes | memoryview] = []
        self.queued = 0
        self.paused = False
        self.window = DEFAULT_WINDOW  # bytes that the server still allows on the connection
        self.initial_window = DEFAULT_WINDOW
        self.max_frame = 16384
        self.max_streams = LARGEST_WINDOW
        self.buffer = bytearray(BUFFER)
        self.view = memoryview(self.buffer)
        self.filled = 0
        self.reading: tuple[int, int] = (0, 0)  # stream and missing bytes of a DATA frame read in part
        self.unacknowledged = 0

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=PIECE, low=PIECE // 4)
        self.transport.write(
            PREFACE
            + settings(
                (ENABLE_PUSH, 0),
                (INITIAL_WINDOW_SIZE, LARGEST_WINDOW),
                (MAX_FRAME_SIZE, 2**22),  # as C-core's clients set it
            )
            + window_update(LARGEST_WINDOW - DEFAULT_WINDOW)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._abort(f"the server closed the connection ({exc})" if exc else "the server closed the connection")
        self.lost.set_result(None)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._pump()
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        pos, end, buffer = 0, self.filled + nbytes, self.buffer
        if self.reading[1]:
            pos = self._data(*self.reading, pos, end)
        while end - pos >= 9:
            head, flags, stream = FRAME.unpack_from(buffer, pos)
            kind, size = head & 255, head >> 8
            if kind == DATA:
                if flags & (PADDED | END_STREAM):
                    self._abort("a DATA frame with padding, or ending a stream that needs trailers")
                pos = self._data(stream, size, pos + 9, end)
                continue
            if end - pos - 9 < size:  # frames other than DATA are read whole
                if size > BUFFER - 9:  # no server sends that much; text instead of frames looks like it
                    self._abort(f"no HTTP/2 from the server: {bytes(self.view[pos : pos + 40])!r}")
                break
            if kind == HEADERS:
                if flags & END_STREAM:
                    self._finish(stream)
            else:
                self._control(kind, flags, stream, bytes(self.view[pos + 9 : pos + 9 + size]))
            pos += 9 + size
        self.filled = end - pos
        if self.filled:
            buffer[: self.filled] = buffer[pos:end]
        self._flush()

    # --- replies

    def _data(self, stream: int, size: int, pos: int, end: int) -> int:
        """Count the bytes of a DATA frame that have arrived; returns the position where they end."""
        here = min(size, end - pos)
        self.reading = (stream, size - here)
        call = self.calls.get(stream)
        if call is not None:
            if not call.received and self.tally is not None:
                self.tally.first_bytes.append(time.perf_counter() - call.started)
            call.received += here
            if call.kept is not None:
                call.kept += self.view[pos : pos + here]
        self.unacknowledged += here
        if self.unacknowledged >= REPLENISH:
            self.out.append(window_update(self.unacknowledged))
            self.unacknowledged = 0
        return pos + here

    def _finish(self, stream: int) -> None:
        """Handle trailers: check and record the reply, and start the next call in its place."""
        call, tally = self.calls.pop(stream, None), self.tally
        if call is None or tally is None:
            return
        if call.offset != len(call.body):
            self._wrong(call)
            return
        if call.request.holds:
            if call.kept is None or (text := call.request.missing(call.kept)):
                self._wrong(call) if not call.received else tally.wrong(text)
                return
        elif call.received != self.expected_size:
            self._wrong(call)
            return
        elif call.kept is not None and call.kept != tally.expected:
            tally.wrong(f"the reply has the right length, {call.received}, but other bytes than expected")
            return
        now = time.perf_counter()
        tally.latencies.append(now - call.started)
        if now < tally.deadline:
            self._start()
        else:
            tally.close_slot()

    def _wrong(self, call: OpenCall) -> None:
        """Record what is wrong with a reply, and stop sending its request."""
        self.sending = [other for other in self.sending if other is not call]
        if call.received == 0:
            text = "an error: trailers without any data"
        else:
            text = f"{call.received} bytes in place of {self.expected_size}, gRPC's prefixes in both"
        if call.offset != len(call.body):
            text += f"; it came after {call.offset} of the request's {len(call.body)} bytes"
        if self.tally:
            self.tally.wrong(text)

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Handle a frame that is neither DATA nor HEADERS."""
        if kind == PING and not flags & ACK:
            self.out.append(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == WINDOW_UPDATE:
            step = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += step
            elif stream in self.calls:
                self.calls[stream].window += step
            self._pump()
        elif kind == RST_STREAM and stream in self.calls:
            self.calls.pop(stream)
            self._abort(f"stream reset by the server, HTTP/2 error {int.from_bytes(payload, 'big')}")
        elif kind == GOAWAY:
            code = int.from_bytes(payload[4:8], "big")
            self._abort(f"GOAWAY from the server, HTTP/2 error {code}: {payload[8:200].decode(errors='replace')}")

    def _settings(self, payload: bytes) -> None:
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                for call in self.calls.values():  # the change applies to open streams, too
                    call.window += value - self.initial_window
                self.initial_window = value
            elif name == HEADER_TABLE_SIZE:
                self.headers.limit_table(value)
            elif name == MAX_FRAME_SIZE:
                self.max_frame = value
            elif name == MAX_CONCURRENT_STREAMS:
                self.max_streams = value
        self.out.append(frame(SETTINGS, ACK, 0))
        self._pump()
        if not self.ready.done():
            self.ready.set_result(None)

    def _abort(self, text: str) -> None:
        if self.tally:
            self.tally.abort(text)
        if not self.ready.done():
            self.ready.set_exception(BenchError(text))

    # --- requests

    def begin(self, tally: Tally) -> None:
        """Open the calls of one run."""
        if self.in_flight > self.max_streams:
            raise BenchError(
                f"{self.in_flight} in flight, but the server takes {self.max_streams} on a connection"
            )
        if self.transport.is_closing():
            raise BenchError("the server closed the connection")
        self.tally = tally
        self.expected_size = len(tally.expected)
        tally.open_slots += self.in_flight
        self._start().kept = bytearray()
        for _ in range(self.in_flight - 1):
            self._start()
        self._flush()

    def _open(self) -> OpenCall:
        """Send the headers of the next call."""
        number = self.next_stream
        self.next_stream = number + 2
        request, body = next(self.requests)
        call = self.calls[number] = OpenCall(number, request, body, time.perf_counter(), self.initial_window)
        block = self.headers.block(request.timeout, request.metadata)
        self.out += (FRAME.pack(len(block) << 8 | HEADERS, END_HEADERS, number), block)
        return call

    def _start(self) -> OpenCall:
        call = self._open()
        size = len(call.body)
        if size <= self.max_frame and size <= self.window and size <= call.window and not self.sending:
            self.window -= size
            call.offset = size
            self.out += (FRAME.pack(size << 8 | DATA, END_STREAM, call.stream), call.body)
        else:
            self.sending.append(call)
            self._pump()
        return call

    def _pump(self) -> None:
        """Send as much of the pending bodies as the windows and the socket allow."""
        if not self.sending:
            return
        for call in self.sending:
            body, size = call.body, len(call.body)
            while not self.paused:
                room = min(size - call.offset, self.window, call.window, self.max_frame, PIECE)
                if room <= 0:
                    break
                end = call.offset + room
                self.out.append(FRAME.pack(room << 8 | DATA, END_STREAM if end == size else 0, call.stream))
                if room < JOINED:
                    self.out.append(body[call.offset : end])
                else:
                    self._flush()
                    self.transport.write(body[call.offset : end])
                call.offset = end
                call.window -= room
                self.window -= room
                self.queued += room
                if self.queued >= PIECE:
                    self._flush()
        self.sending = [call for call in self.sending if call.offset < len(call.body)]

    def _flush(self) -> None:
        if self.out:
            self.transport.write(b"".join(self.out))
            self.out.clear()
            self.queued = 0

    def close(self) -> None:
        """Close the connection; data that still arrives is no error."""
        self.tally = None
        self.transport.close()


def headers_of(port: int, path: str, indexed: bool = False) -> HeaderBlocks:
    """Return the header blocks for a new connection to a local server."""
    return HeaderBlocks(path, f"127.0.0.1:{port}", indexed)


async def connect(
    port: int,
    path: str,
    requests: Sequence[Request],
    in_flight: int,
    connections: int = 1,
    *,
    indexed: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Sequence[H2Connection]:
    """Open connections to a local server that share the calls in flight evenly; `indexed` as in `HeaderBlocks`."""
    loop = asyncio.get_running_loop()
    share = in_flight // connections
    if share * connections != in_flight or not share:
        raise BenchError(f"{in_flight} in flight cannot be shared evenly by {connections} connections")
    opened: list[H2Connection] = []
    try:
        for _ in range(connections):
            _, connection = await loop.create_connection(
                lambda: H2Connection(framed_requests(requests), share, headers_of(port, path, indexed)),
                "127.0.0.1",
                port,
                ssl=tls,
            )
            opened.append(connection)
            async with asyncio.timeout(10):
                await connection.ready  # the server's SETTINGS, with windows and frame size
    except BaseException as error:
        for connection in opened:
            connection.close()
        if isinstance(error, TimeoutError):
            raise BenchError("no HTTP/2 SETTINGS from the server within 10 s") from None
        raise
    return opened
