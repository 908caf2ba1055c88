"""Long streams to grps' clients: nothing is lost, slow readers hold the model up, and those that leave end it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path

import grpc
import psutil
import pytest

from tests.e2e.server_process import ServerProcess
from tests.grps_toys import PROJECTS, grps_arguments
from tests.process import SECONDS
from tests.waiting import wait_until
from triglot.pb.grps.grps_pb2 import GrpsMessage

pytestmark = pytest.mark.both_transports

MODELS = Path(__file__).resolve().parents[1] / "models"
STREAMING = "/grps.protos.v1.GrpsService/PredictStreaming"
COUNT, SIZE = 3_000, 64 * 1024
"""Of the messages of a long stream: 187 MiB."""
STALLS = (1, 100, 1_000, 2_500)
"""How many messages the slow reader has read when it rests."""
RECEIVE_BUFFER = 256 * 1024
AHEAD = 200
"""How many messages the model may be ahead of the reader, 12.5 MiB: the kernel's buffers hold most of them."""
MEMORY = 16 * 2**20
"""How much larger the server may become in a long stream, in bytes: 16 MiB of the 187."""
QUIET_SECONDS = 0.3
STOP_SECONDS = 0.1
"""How long a model may run after its reader has left."""
TRIES = 10

Reader = Callable[[ServerProcess, bytes], Generator[bytes, None, None]]


class Server(ServerProcess):
    """A server that can be looked at from outside."""

    def memory(self) -> int:
        """Its resident memory, in bytes."""
        return int(psutil.Process(self._process.pid).memory_info().rss)


@pytest.fixture(scope="module", params=["project", "model"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the model `flood`, a grps project or a Python model."""
    if request.param == "model":
        process = Server(str(MODELS / "flood"))
    else:
        arguments = grps_arguments(PROJECTS / "flood", tmp_path_factory.mktemp("flood"))
        process = Server(*arguments, command="grps")
    with process:
        yield process


def read_grpc(server: ServerProcess, request: bytes) -> Generator[bytes, None, None]:
    """The messages' bin_data. Leaving it cancels the call."""
    # Without the probe, gRPC's window stays small: what is on its way is not the server's.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.grpc_address, options) as channel:
        method = channel.unary_stream(STREAMING, response_deserializer=GrpsMessage.FromString)
        call = method(GrpsMessage(bin_data=request).SerializeToString(), timeout=10 * SECONDS)
        try:
            for message in call:
                assert (message.status.code, message.status.msg) == (200, "OK")
                yield message.bin_data
        finally:
            call.cancel()


def read_http(server: ServerProcess, request: bytes) -> Generator[bytes, None, None]:
    """The chunks. Leaving it closes the connection."""
    host, port = server.rest_address.split(":")
    # A fixed buffer: the kernel would let it grow to more than is asked for here.
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    reader.settimeout(SECONDS)
    reader.connect((host, int(port)))
    with closing(HTTPConnection(host, int(port))) as connection:
        connection.sock = reader
        connection.request(
            "POST",
            "/grps/v1/infer/predict?streaming=true",
            request,
            {"Content-Type": "application/octet-stream"},
        )
        with connection.getresponse() as response:
            assert (response.status, response.chunked) == (200, True)
            while size := int(response.fp.readline(), 16):
                yield response.fp.read(size)
                response.fp.readline()


READERS = pytest.mark.parametrize("read", [read_grpc, read_http], ids=["grpc", "http"])


@dataclass(frozen=True)
class Order:
    """What is asked of `flood`, and what it notes."""

    folder: Path
    count: int = COUNT
    size: int = SIZE
    pause: float = 0.0
    waits: bool = False

    def request(self) -> bytes:
        """The model's input."""
        self.folder.mkdir(exist_ok=True)
        return json.dumps(asdict(self) | {"folder": str(self.folder)}).encode()

    def given(self) -> int:
        """How many messages the model has given."""
        return int.from_bytes((self.folder / "progress").read_bytes(), "little")

    def stopped(self) -> float:
        """When the model stopped. Raise `AssertionError` when it continues."""
        file = self.folder / "stopped"
        wait_until(file.exists)
        return float(file.read_text())

    def wait_until_held_up(self) -> None:
        """Until the model gives nothing for a while."""
        given, since = -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal given, since
            now = self.given()
            if now != given:
                given, since = now, time.monotonic()
            return time.monotonic() - since > QUIET_SECONDS

        wait_until(is_quiet)


def number_of(item: bytes) -> int:
    assert len(item) == SIZE
    return int.from_bytes(item[:8], "little")


@READERS
def test_slow_reader(server: Server, read: Reader, tmp_path: Path) -> None:
    """It gets every message in order; the model waits for it, and the server keeps few of them."""
    warm_up = Order(tmp_path / "warm_up", count=500)
    assert [number_of(item) for item in read(server, warm_up.request())] == list(range(500))
    before = most = server.memory()
    order = Order(tmp_path / "order")
    numbers, ahead = [], []
    for item in read(server, order.request()):
        numbers.append(number_of(item))
        if len(numbers) in STALLS:
            order.wait_until_held_up()
            ahead.append(order.given() - len(numbers))
        if len(numbers) % 100 == 0 or len(numbers) in STALLS:
            most = max(most, server.memory())
    assert numbers == list(range(COUNT))
    assert len(ahead) == len(STALLS)
    assert max(ahead) <= AHEAD, ahead
    assert most - before <= MEMORY, f"{before} bytes before, {most} at most"


@READERS
def test_messages_leave_at_once(server: Server, read: Reader, tmp_path: Path) -> None:
    """The model gives the next one when the last one was read."""
    order = Order(tmp_path / "order", count=20, waits=True)
    for number, item in enumerate(read(server, order.request())):
        assert number_of(item) == number
        assert order.given() == number + 1
        (order.folder / f"read-{number}").touch()
    assert order.given() == order.count


@READERS
@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["held-up", "at-work"])
def test_reader_that_leaves(server: Server, read: Reader, pause: float, tmp_path: Path) -> None:
    """The model stops within 100 ms, whether it waits for the reader or not; its own clock says so."""
    seconds = []
    for attempt in range(TRIES):
        order = Order(tmp_path / str(attempt), count=10**9, pause=pause)
        items = read(server, order.request())
        for number in range(10):
            assert number_of(next(items)) == number
        if not pause:
            order.wait_until_held_up()
        left = time.monotonic()
        items.close()
        seconds.append(order.stopped() - left)
        if seconds[-1] <= STOP_SECONDS:
            break
    assert min(seconds) <= STOP_SECONDS, seconds
