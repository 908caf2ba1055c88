"""A load client for HTTP/1.1 with keep-alive: prebuilt requests in turn, one call in flight on each connection.

It is written on bare sockets for the same reason as `h2client`: an HTTP client library costs as much as the server
under test, and would hide differences.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from random import randrange
from typing import cast

from bench.tally import BenchError, Request, Tally

BUFFER = 2**18
BLANKS = b" \n"
"""Whitespace that JSON encoders may write between values."""
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?:\r\n|$)", re.IGNORECASE)


def request_bytes(port: int, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return a complete POST request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode() + body


class HttpConnection(asyncio.BufferedProtocol):
    """A connection that sends its next request as soon as the reply is complete. On the event loop."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self.requests = requests
        self.request = Request(b"")
        self.tally: Tally | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer = bytearray(BUFFER)
        self.view = memoryview(self.buffer)
        self.filled = 0
        self.head = b""  # the reply's head, empty until it is complete
        self.length = 0
        self.left = 0  # bytes of the body still to come
        self.kept: bytearray | None = None  # the body, if its content is checked
        self.started = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.tally and self.started:
            self.tally.abort(f"the server closed the connection ({exc or 'no error'})")
        self.lost.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        end, pos = self.filled + nbytes, 0
        if not self.head:
            stop = self.buffer.find(b"\r\n\r\n", 0, end)
            if stop < 0:
                self.filled = end
                if end == BUFFER:
                    self._abort("no end of the reply's head")
                return
            self.head = bytes(self.view[:stop])
            self._read_head()
            pos = stop + 4
        self.filled = 0
        self.left -= end - pos
        if self.kept is not None:
            self.kept += self.view[pos:end]
        if self.left == 0:
            self._finish()
        elif self.left < 0:
            self._abort("more bytes than the reply's Content-Length")

    def _read_head(self) -> None:
        length = CONTENT_LENGTH.search(self.head)
        if length is None:
            self._abort(f"a reply without Content-Length: {self.head[:300]!r}")
            return
        self.left = self.length = int(length[1])
        if not self.head.startswith(b"HTTP/1.1 200 "):
            self.kept = bytearray()

    def _finish(self) -> None:
        """Check and record the complete reply, and send the next request."""
        tally, kept, head = self.tally, self.kept, self.head
        started, self.started, self.head, self.kept = self.started, 0.0, b"", None
        if tally is None:
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            status = head.split(b"\r\n", 1)[0].decode(errors="replace")
            tally.wrong(f"{status}: {bytes(kept or b'')[:500].decode(errors='replace')}")
        elif wrong := self._wrong(kept, tally.expected):
            tally.wrong(wrong)
        else:
            now = time.perf_counter()
            tally.latencies.append(now - started)
            if now < tally.deadline:
                self._send()
            else:
                tally.close_slot()

    def _wrong(self, kept: bytearray | None, expected: bytes) -> str:
        if self.request.holds:
            return self.request.missing((kept or b"").translate(None, BLANKS))
        if self.length != len(expected):
            return f"{self.length} bytes in place of {len(expected)}"
        if kept is not None and kept != expected:
            return f"the reply has the right length, {self.length}, but other bytes than expected"
        return ""

    def _abort(self, text: str) -> None:
        if self.tally:
            self.tally.abort(text)
        self.close()

    def _send(self) -> None:
        self.request = next(self.requests)
        if self.request.holds:
            self.kept = bytearray()
        self.started = time.perf_counter()
        self.transport.write(self.request.body)

    def begin(self, tally: Tally) -> None:
        """Send the first request of a run; if it has no `holds`, its reply is compared byte by byte."""
        if self.transport.is_closing():
            raise BenchError("the server closed the connection")
        self.tally = tally
        self.kept = bytearray()
        tally.open_slots += 1
        self._send()

    def close(self) -> None:
        """Close the connection; data that still arrives is no error."""
        self.tally = None
        self.transport.close()


async def connect(port: int, requests: Sequence[Request], connections: int) -> Sequence[HttpConnection]:
    """Open connections to a local server, each of which begins with a different request."""
    loop = asyncio.get_running_loop()
    return [
        (
            await loop.create_connection(
                lambda: HttpConnection(islice(cycle(requests), randrange(len(requests)), None)), "127.0.0.1", port
            )
        )[1]
        for _ in range(connections)
    ]
