"""Measures how much of the server's memory one connection can hold, whatever it sends (HTTP/2 and HTTP/1.1).

From the repository's root: `python -m bench.connection_memory --help`. Each way of wasting memory has a server
of its own, whose resident size is read before the connections are opened, and after all have sent their data.
"""

import argparse
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import report, servers
from bench.h2frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
    settings,
    window_update,
)
from bench.other_results import WRONG
from bench.payloads import GRPC_PATH, STREAM_PATH, infer_request, tensor
from bench.tally import BenchError

CONNECTIONS = 1000
LIMIT = 2**20
"""Most bytes of the server's memory per connection."""
STREAMS = 256
"""Streams of one connection: with so many on each, the server's limit of calls that are open on all connections is
reached long before the last connection."""
BLOCKS = 100
"""Header blocks of one connection, which together decode to more than a MiB."""
FEW_BLOCKS = 25
"""As `BLOCKS`, for small fields, which decode to many times the size that HTTP/2 counts, and take long."""
MANY_STREAMS = 1024
"""Streams of one connection, as many as the server allows."""
CONTINUATION = 9
UNKNOWN_PATH = "/none"
LIVE_PATH = "/inference.GRPCInferenceService/ServerLive"
SECONDS = 30.0
"""Seconds within which the server must have read all data of a connection."""
SETTLED = 0.02
"""The resident size is read when it grows by no more than this in a second."""
BLOCKED = 1.0
"""Seconds without room in the socket, after which a client that reads nothing has sent all that it can."""
MODELS = {
    "held": """
    async def infer(self, inputs):
        await asyncio.Event().wait()  # Until its caller leaves.
""",
    "endless": """
    async def infer(self, inputs):
        while True:
            yield {"y": inputs["x"]}
""",
}
HEAD = """
import asyncio
import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
"""


def _length(count: int, bits: int, first: int) -> bytes:
    """Return an HPACK integer (RFC 7541, 5.1) with a prefix of `bits`; `first` has the other bits of its byte."""
    most = (1 << bits) - 1
    if count < most:
        return bytes([first | count])
    encoded, count = bytearray([first | most]), count - most
    while count >= 128:
        encoded.append(count & 127 | 128)
        count >>= 7
    encoded.append(count)
    return bytes(encoded)


def field(name: str, value: str, *, indexed: bool = False) -> bytes:
    """Return a literal header field; `indexed`: it enters the dynamic table."""
    text = b"".join(_length(len(text_part), 7, 0) + text_part.encode() for text_part in (name, value))
    return (b"\x40" if indexed else b"\x00") + text


def call(path: str) -> bytes:
    """Return the header block of a gRPC call."""
    return b"\x83\x86" + field(":path", path) + field("content-type", "application/grpc") + field("te", "trailers")


def headers(stream: int, block: bytes, *, end: bool = False) -> bytes:
    """Return a request's HEADERS frame."""
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)


def message(body: bytes, size: int | None = None) -> bytes:
    """Return a message with gRPC's prefix, which declares `size` bytes, or the body's size."""
    return b"\0" + (len(body) if size is None else size).to_bytes(4) + body


LAST = b"\xbe"
"""Reference to the newest entry of the dynamic table."""
NUMBERS = range(1, 2 * STREAMS, 2)
LARGE_FIELD = field("a", "x" * 3900, indexed=True)
TABLE = headers(1, call(UNKNOWN_PATH) + LARGE_FIELD, end=True)
"""A call that leaves a large entry in the dynamic table."""
REST_PATH = "/v2/models/held/infer"
BODY = infer_request("endless", tensor(1, 16)).SerializeToString()
HELD = infer_request("held", tensor(1, 16)).SerializeToString()


def idle() -> bytes:
    """No data."""
    return b""


def remembered() -> bytes:
    """Small, different header blocks, each with as many references to a large entry as one request may have."""
    block = call(UNKNOWN_PATH) + LAST * 4
    return TABLE + b"".join(headers(n, block + field("n", str(n)), end=True) for n in NUMBERS[1:BLOCKS])


def remembered_small_fields() -> bytes:
    """As `remembered`, with as many small fields as one request may have."""
    return headers(1, call(UNKNOWN_PATH) + field("a", "b", indexed=True), end=True) + b"".join(
        headers(number, call(UNKNOWN_PATH) + LAST * 440 + field("n", str(number)), end=True)
        for number in NUMBERS[1:FEW_BLOCKS]
    )


def table() -> bytes:
    """A dynamic table of many small entries."""
    return headers(1, call(UNKNOWN_PATH) + b"".join(field("a", "b", indexed=True) for _ in range(300)), end=True)


def unfinished_block() -> bytes:
    """A header block without an end."""
    parts = [frame(CONTINUATION, 0, 1, field("a", "x" * 3900)) for _ in range(10)]
    return frame(HEADERS, 0, 1, call(UNKNOWN_PATH)) + b"".join(parts)


def open_calls() -> bytes:
    """Calls without a body."""
    return b"".join(headers(number, call(GRPC_PATH)) for number in NUMBERS)


def open_calls_deadlines() -> bytes:
    """Calls without a body, with different deadlines."""
    block = call(GRPC_PATH)
    return b"".join(headers(number, block + field("grpc-timeout", f"{number + 9000}S")) for number in NUMBERS)


def open_calls_windows() -> bytes:
    """Calls without a body, whose windows are then enlarged."""
    update = (60_000).to_bytes(4)
    return b"".join(headers(n, call(GRPC_PATH)) + frame(WINDOW_UPDATE, 0, n, update) for n in NUMBERS)


def open_metadata() -> bytes:
    """Calls without a body, with as much metadata as one may have."""
    return TABLE + b"".join(
        headers(number, call(GRPC_PATH) + LAST * 4 + field("n", str(number))) for number in NUMBERS[1:BLOCKS]
    )


def open_small_metadata() -> bytes:
    """As `open_metadata`, with small fields."""
    return headers(1, call(UNKNOWN_PATH) + field("a", "b", indexed=True), end=True) + b"".join(
        headers(number, call(GRPC_PATH) + LAST * 440 + field("n", str(number))) for number in NUMBERS[1:FEW_BLOCKS]
    )


def open_streams() -> bytes:
    """Bidirectional streams without messages."""
    return b"".join(headers(number, call(STREAM_PATH)) for number in NUMBERS)


def running_calls() -> bytes:
    """Calls of a model that never responds."""
    body = message(HELD)
    return b"".join(headers(n, call(GRPC_PATH)) + frame(DATA, END_STREAM, n, body) for n in NUMBERS)


def running_streams() -> bytes:
    """Streams of a model that yields forever, whose responses have no window."""
    body = message(BODY)
    return b"".join(headers(n, call(STREAM_PATH)) + frame(DATA, 0, n, body) for n in NUMBERS)


def rest(*fields: bytes) -> bytes:
    """Return the header block of a REST request."""
    return b"\x83\x86" + field(":path", REST_PATH) + field(":authority", "localhost") + b"".join(fields)


def open_rest() -> bytes:
    """REST requests without a body."""
    return b"".join(headers(number, rest()) for number in NUMBERS)


def open_rest_fields() -> bytes:
    """As `open_rest`, with as many fields as one request may have."""
    return TABLE + b"".join(headers(n, rest(LAST * 4, field("n", str(n)))) for n in NUMBERS[1:BLOCKS])


def announced() -> bytes:
    """Messages with a large declared size, of which one byte is sent."""
    body = frame(DATA, 0, 1, message(b"x", 16 * 2**20))
    return b"".join(
        headers(number, call(GRPC_PATH)) + body[:5] + number.to_bytes(4) + body[9:] for number in NUMBERS
    )


def small_messages() -> bytes:
    """A stream with many small requests, which its handler does not read."""
    many = message(b"\x0a\x00") * 2000
    return headers(1, call(STREAM_PATH)) + frame(DATA, 0, 1, message(BODY)) + frame(DATA, 0, 1, many) * 4


def resets() -> bytes:
    """Streams that are reset."""
    wrong = frame(RST_STREAM, 0, 1, bytes(4))
    return b"".join(
        headers(number, call(GRPC_PATH)) + wrong[:5] + number.to_bytes(4) + wrong[9:] for number in NUMBERS
    )


UNREAD = headers(1, call(STREAM_PATH)) + frame(DATA, 0, 1, message(BODY))
"""A stream whose responses fill the socket."""


def unread_statuses() -> bytes:
    """Calls that fail; the client does not read their statuses."""
    return UNREAD + b"".join(headers(number, call("/x"), end=True) for number in range(3, 40_000, 2))


def unread_acknowledgements() -> bytes:
    """PING frames; the client does not read their acknowledgements."""
    return UNREAD + frame(PING, 0, 0, bytes(8)) * 900


def unread_answers() -> bytes:
    """Calls whose responses have no window."""
    empty = message(b"")
    return b"".join(
        headers(n, call(LIVE_PATH)) + frame(DATA, END_STREAM, n, empty) for n in range(1, 2 * MANY_STREAMS, 2)
    )


HOST = b"Host: localhost\r\n"
HTTP_BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'


def post(body: bytes, *fields: bytes) -> bytes:
    """Return an HTTP/1.1 request to the model that never responds."""
    lines = [
        b"POST %b HTTP/1.1" % REST_PATH.encode(),
        b"Host: localhost",
        b"Content-Length: %d" % len(body),
        *fields,
    ]
    return b"\r\n".join([*lines, b"", body])


def http_idle() -> bytes:
    """A request line without an end."""
    return b"GET"


def http_unfinished_head() -> bytes:
    """As many long fields as the server accepts, and no end of the head."""
    return b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"%d: %b\r\n" % (n, b"x" * 1000) for n in range(126))


def http_unfinished_line() -> bytes:
    """A header field without an end."""
    return b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"x" * 500_000


def http_running() -> bytes:
    """A call with a large head, of a model that never responds."""
    return post(HTTP_BODY, *(b"%d: %b" % (n, b"x" * 1000) for n in range(120)))


def http_pipelined() -> bytes:
    """Pipelined requests behind one that gets no response."""
    return post(HTTP_BODY) + (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") * 20_000


def http_pipelined_fields() -> bytes:
    """As `http_pipelined`, with many small fields."""
    fields = b"".join(b"%d:\r\n" % n for n in range(120))
    return post(HTTP_BODY) + (b"GET / HTTP/1.1\r\n" + HOST + fields + b"\r\n") * 1000


def http_pipelined_bodies() -> bytes:
    """As `http_pipelined`, with bodies."""
    return post(HTTP_BODY) + post(bytes(100_000)) * 10


def http_upgrade() -> bytes:
    """Data after a request to upgrade to another protocol."""
    return post(HTTP_BODY, b"Connection: upgrade", b"Upgrade: websocket") + bytes(1_000_000)


def http_trailers() -> bytes:
    """A chunked body, whose trailers have no end."""
    head = b"POST %b HTTP/1.1\r\n" % REST_PATH.encode() + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"0\r\n" + b"".join(b"%d: %b\r\n" % (n, b"x" * 10_000) for n in range(100))


def http_unread() -> bytes:
    """Requests; the client does not read their responses."""
    return (b"GET /v2 HTTP/1.1\r\n" + HOST + b"\r\n") * 20_000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of wasting memory. `make` returns the data that a connection sends.

    `window`: the client's initial window per stream, in bytes. `reads`: whether the client reads. `http1`: it uses
    HTTP/1.1, on the REST port.
    """

    make: Callable[[], bytes]
    window: int = 0
    reads: bool = True
    http1: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__


WAYS = (
    Way(idle),
    Way(remembered),
    Way(remembered_small_fields),
    Way(table),
    Way(unfinished_block, reads=False),  # Within a header block no other frame is allowed, not even a PING.
    Way(open_calls),
    Way(open_calls_deadlines),
    Way(open_calls_windows),
    Way(open_metadata),
    Way(open_small_metadata),
    Way(open_streams),
    Way(running_calls),
    Way(running_streams),
    Way(open_rest),
    Way(open_rest_fields),
    Way(announced),
    Way(small_messages),
    Way(resets),
    Way(unread_statuses, LARGEST_WINDOW, reads=False),
    Way(unread_acknowledgements, LARGEST_WINDOW, reads=False),
    Way(unread_answers),
    *(
        Way(make, reads=False, http1=True)
        for make in (
            http_idle,
            http_unfinished_head,
            http_unfinished_line,
            http_running,
            http_pipelined,
            http_pipelined_fields,
            http_pipelined_bodies,
            http_upgrade,
            http_trailers,
            http_unread,
        )
    ),
)


def _read(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := client.recv(count - len(data))):
            raise ConnectionResetError
        data += more
    return data


def _answers_ping(client: socket.socket) -> bool:
    """Wait until the server has read all data; returns False if it has closed the connection."""
    mine = b"is heard"
    client.sendall(frame(PING, 0, 0, mine))
    while True:
        head = _read(client, 9)
        payload = _read(client, int.from_bytes(head[:3]))
        if head[3] == PING and payload == mine:
            return True
        if head[3] == GOAWAY:
            return False


def waste(port: int, way: Way, data: bytes, ends: ExitStack) -> bool:
    """Open a connection, which `ends` closes, and send the data; returns whether the server has kept it open.

    Raise `BenchError` if the server does not read the data within `SECONDS`.
    """
    client = ends.enter_context(socket.socket())
    if not way.reads:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.settimeout(SECONDS if way.reads else BLOCKED)
    hello = PREFACE + settings((INITIAL_WINDOW_SIZE, way.window))
    if way.window:
        hello += window_update(LARGEST_WINDOW - 65_535)
    if way.http1:
        hello = b""
    try:
        client.sendall(hello + data)
        return not way.reads or _answers_ping(client)
    except TimeoutError:
        if way.reads:
            raise BenchError(f"{way.name}: a connection is not heard for {SECONDS:.0f} s") from None
        return True
    except ConnectionError:
        return False


def _settled(server: servers.Server) -> int:
    """Return the server's resident size in bytes once it grows no further."""
    seen = 0
    while True:
        now = server.resident_bytes()
        if now is None:
            raise BenchError("this platform does not say how much memory another process has")
        if now < seen * (1 + SETTLED):
            return now
        seen = now
        time.sleep(1)  # No event signals that another process's memory has stopped growing.


def measure(way: Way, connections: int) -> tuple[float, int]:
    """Return the bytes that one connection holds, and the number that stayed open. Raise `BenchError`."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name, ExitStack() as ends:
        models = Path(name) / "models"
        for model, code in MODELS.items():
            (models / model).mkdir(parents=True)
            (models / model / "model.py").write_text(HEAD + code)
        flags = ["--grpc-transport", "h2", "--log-level", "error", "--grace", "0"]
        server, grpc_port, rest_port = ends.enter_context(servers.serving(models, None, flags))
        port = rest_port if way.http1 else grpc_port
        data = way.make()
        with ExitStack() as first:
            waste(port, way, data, first)  # Memory for first use belongs to no connection.
        before = _settled(server)
        stayed = sum(waste(port, way, data, ends) for _ in range(connections))
        held = (_settled(server) - before) / connections
        if not server.alive():
            raise BenchError(f"{way.name}: the server has ended\n{server.tail()}")
        return held, stayed


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if a connection can hold more than `LIMIT`, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.connection_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="of each kind (default: %(default)s)")
    parser.add_argument("--only", default="", help="ways, with commas (default: all)")
    arguments = parser.parse_args(words)
    names = [name for name in arguments.only.split(",") if name]
    if unknown := [name for name in names if name not in [way.name for way in WAYS]]:
        parser.error(f"unknown way {unknown[0]!r}; there are {', '.join(way.name for way in WAYS)}")
    print(*report.machine(), sep="\n")
    print(
        f"{arguments.connections} connections each; at most {LIMIT / 1024:.0f} KiB a connection wanted\n",
        flush=True,
    )
    right = True
    for way in WAYS:
        if names and way.name not in names:
            continue
        try:
            held, stayed = measure(way, arguments.connections)
        except BenchError as error:
            print(error, file=sys.stderr)
            return 1
        right &= held <= LIMIT
        verdict = "as it should be" if held <= LIMIT else WRONG
        print(
            f"{way.name:>25}: {held / 1024:8.1f} KiB a connection, {len(way.make()) / 1024:8.1f} KiB sent, "
            f"{stayed} stayed, {verdict}",
            flush=True,
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
