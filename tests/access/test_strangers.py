"""Large bodies: those of strangers cost the server no memory, and friends no calls; those of friends come."""

from __future__ import annotations

import asyncio
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.access.access_clients import guarded_server, infer_request
from tests.access.access_files import client, write
from tests.access.strangers import MIB, MODEL_INFER, Stranger, over_grpc, over_http1, over_rest_of_http2
from tests.process import FREE_PORTS, PLAIN_MODELS, SECONDS, Triglot
from tests.transports.h2_peers import Client
from triglot.transports.http2.core import frames

STRANGERS = 64
"""At a time."""
TIMES = 3
"""Each comes so often."""


@dataclass(frozen=True)
class Way:
    """How strangers come, to which transport; what they are answered, and what the server may take for all."""

    stranger: Stranger
    grpc_transport: str
    http_transport: str
    answer: str
    most: int = 20 * MIB


WAYS = {
    "gRPC": Way(over_grpc, "h2", "h1", "16"),
    "HTTP/1.1": Way(over_http1, "h2", "h1", "401"),
    "REST over HTTP/2": Way(over_rest_of_http2, "h2", "h1", "401"),
    # Their libraries read ahead of whoever refuses the call, the more the busier the machine is: 2 to 30 MiB for
    # all with gRPC's, which may read 4 MiB of each, and 80 MiB with aiohttp.
    "grpc.aio": Way(over_grpc, "aio", "aiohttp", "16", most=128 * MIB),
    "aiohttp": Way(over_http1, "aio", "aiohttp", "401", most=128 * MIB),
}


class Memory:
    """The largest resident size of a process from now on, beyond that of now; in bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # The peak is that of now.
        self._before = self._of("VmRSS")

    def _of(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", (self._folder / "status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def more(self) -> int:
        """So far."""
        return self._of("VmHWM") - self._before


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_large_bodies_of_strangers(tmp_path: Path, way: Way) -> None:
    access = write(tmp_path / "access.toml", client("friend", ["secret"], ["infer"]))
    transports = "--grpc-transport", way.grpc_transport, "--http-transport", way.http_transport
    with Triglot(PLAIN_MODELS, *FREE_PORTS, "--access", access, *transports) as server:
        grpc_port, rest_port = server.ports()
        port = rest_port if way.stranger is over_http1 else grpc_port
        asyncio.run(_meet(server.pid, way, port, grpc_port))


async def _meet(pid: int, way: Way, port: int, grpc_port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer, body = channel.unary_unary(MODEL_INFER), infer_request().SerializeToString()

        async def friend() -> None:
            """Raise what a call fails with."""
            await infer(body, metadata=[("authorization", "Bearer secret")], timeout=SECONDS)

        async def strangers() -> list[str]:
            return await asyncio.gather(*(way.stranger(port) for _ in range(STRANGERS)))

        for _ in range(10):
            await friend()
        assert await way.stranger(port) == way.answer
        memory = Memory(pid)
        answers = []
        for _ in range(TIMES):
            coming = asyncio.create_task(strangers())
            while not coming.done():
                await friend()
            answers += await coming
        assert answers == [way.answer] * (STRANGERS * TIMES)
        assert memory.more() <= way.most


async def test_the_first_window_of_a_stream_over_http2(tmp_path: Path) -> None:
    """What a client may send before its credentials were looked at."""
    async with guarded_server(tmp_path, client("friend", ["secret"], ["infer"]), grpc_transport="h2") as here:
        peer = Client(*await asyncio.open_connection("127.0.0.1", here.server.grpc_port))
        await peer.greet()
        settings = (await peer.next(frames.SETTINGS)).payload
        assert dict(struct.iter_unpack(">HI", settings))[frames.Setting.INITIAL_WINDOW_SIZE] == 64 * 1024
        await peer.close()


async def test_large_bodies_of_friends(tmp_path: Path) -> None:
    numbers, key = 2**19, ("x-api-key", "secret")
    async with guarded_server(tmp_path, client("friend", ["secret"], ["infer"]), grpc_transport="h2") as here:
        request = infer_request()
        request.inputs[0].shape[:] = [1, numbers]
        request.raw_input_contents[0] = bytes(4 * numbers)
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            await here.infer(request, metadata=[key], compression=compression, timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            stream = here.stream_infer(metadata=[key])
            request.inputs[0].shape[:] = [1, 1000]
            request.raw_input_contents[0] = bytes(4000)
            for _ in range(500):
                await stream.write(request)
                assert (await stream.read()).infer_response.model_name == "identity_fp32"
            assert here.server.grpc_port is not None
            assert await over_rest_of_http2(here.server.grpc_port, key) == "400"  # Zeros are no JSON.
