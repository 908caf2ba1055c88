"""Records what stock clients send in storms: `python -m tests.transports.recordings.record --help`.

A server that answers no call listens on one port, a proxy that writes down what a client sends on another.
Each file holds the bytes of one connection, the one with most, from its beginning, as pieces of the size in which
they came: four bytes of length, then the piece; all of it compressed by xz.
"""

from __future__ import annotations

import argparse
import asyncio
import lzma
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.transports.h2_peers import opened

HERE = Path(__file__).parent
SECONDS = 120
PIECE = 64 * 1024
JARS = "/usr/share/java/*"
CLIENTS = ("c-core", "go", "java", "nghttp2")
STORMS = ("deadlines", "cancels", "reconnects")
COUNTS = {"nghttp2": 900}
"""Its proxy ends a client's connection that resets more than 1000 streams at once, and others' calls with it."""


class Proxy:
    """Hands on what clients send, and keeps it, connection by connection."""

    def __init__(self, port: int) -> None:
        self.connections: list[list[bytes]] = []
        self._port = port

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A client has come."""
        kept: list[bytes] = []
        self.connections.append(kept)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(_pass_on(reader, server_writer, kept), _pass_on(server_reader, writer, None))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: list[bytes] | None) -> None:
    try:
        while piece := await reader.read(PIECE):
            if kept is not None:
                kept.append(piece)
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Run a program to its end."""
    process = await asyncio.create_subprocess_exec(*map(str, words), cwd=cwd, env=env)
    code = await asyncio.wait_for(process.wait(), SECONDS)
    if code:
        raise SystemExit(f"{words[0]} ended with {code}")


async def build_go(folder: Path) -> Path:
    """The client of grpc-go, from the sources that Debian packages."""
    made = folder / "storm-go"
    env = {"GOPATH": "/usr/share/gocode", "GO111MODULE": "off", "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    await run("go", "build", "-o", made, HERE / "storm.go", env=env)
    return made


async def build_java(folder: Path) -> Sequence[str | Path]:
    """The client of grpc-java, from the libraries that Debian packages."""
    await run("javac", "-cp", JARS, "-d", folder, HERE / "Storm.java")
    return "java", "-cp", f"{JARS}:{folder}", "Storm"


@asynccontextmanager
async def nghttpx(folder: Path, port: int) -> AsyncIterator[int]:
    """nghttp2's proxy before a server; its port."""
    with_port = 20_000 + port % 10_000
    conf = folder / "nghttpx.conf"
    conf.write_text("")
    process = await asyncio.create_subprocess_exec(
        "nghttpx",
        "--conf",
        str(conf),
        f"-f127.0.0.1,{with_port};no-tls",
        f"-b127.0.0.1,{port};;proto=h2",
        "--backend-http2-max-concurrent-streams=5000",
        "--frontend-http2-max-concurrent-streams=5000",
        "-n1",
        "--errorlog-file=/dev/null",
    )
    try:
        await asyncio.sleep(1)
        yield with_port
    finally:
        process.terminate()
        await process.wait()


async def record(client: str, storm: str, count: int, folder: Path) -> list[list[bytes]]:
    """What the client's connections send in one storm."""
    async with AsyncExitStack() as ends:
        rows, port = await ends.enter_async_context(opened("h2"))
        rows.gate.clear()
        proxy = Proxy(port)
        listening = await asyncio.start_server(proxy.meet, "127.0.0.1", 0, limit=2**20)
        port = listening.sockets[0].getsockname()[1]
        if client == "nghttp2":
            port = await ends.enter_async_context(nghttpx(folder, port))
        words: Sequence[str | Path] = (sys.executable, HERE / "storm.py")
        if client == "go":
            words = (await build_go(folder),)
        elif client == "java":
            words = await build_java(folder)
        await run(*words, f"127.0.0.1:{port}", storm, str(count))
        rows.gate.set()
        listening.close()
    return [kept for kept in proxy.connections if kept]


def main() -> None:
    """Record what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", choices=CLIENTS, action="append")
    parser.add_argument("--storm", choices=STORMS, action="append")
    parser.add_argument("--count", type=int, help="calls that end together (default: 1200; 900 by nghttp2)")
    parser.add_argument("--into", type=Path, default=HERE, help="the folder for what is recorded")
    chosen = parser.parse_args()
    for client in chosen.client or CLIENTS:
        for storm in chosen.storm or STORMS:
            with tempfile.TemporaryDirectory() as folder:
                connections = asyncio.run(
                    record(client, storm, chosen.count or COUNTS.get(client, 1200), Path(folder))
                )
            pieces = max(connections, key=lambda kept: sum(map(len, kept)))
            packed = b"".join(len(piece).to_bytes(4) + piece for piece in pieces)
            path = chosen.into / f"{client}-{storm}.xz"
            path.write_bytes(lzma.compress(packed))
            size = path.stat().st_size
            print(f"{path.name}: {len(connections)} connections; {len(pieces)} pieces, {size} bytes")


if __name__ == "__main__":
    main()
