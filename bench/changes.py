"""Changes tokens and certificates under load, with two workers: no call of an authorised client may fail."""

import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import grpc
import grpc.aio
import trustme

from bench import payloads, rounds
from bench.servers import Server
from bench.tally import BenchError

MODEL = "identity_fp32"
WORKERS = 2
CHANNELS = 8
"""Number of connections: enough that both workers have some."""
IN_FLIGHT = 2
"""Calls in flight on each connection."""
PATIENCE = 10.0
_SERVES = re.compile(r"worker \d+ \(pid \d+\) serves")


@dataclass(slots=True)
class Changed:
    """Results: numbers of changes, answered calls and ended streams, and texts of failed calls.

    `refused_after`: for each change, seconds until the removed token was rejected on every connection.
    """

    changes: int = 0
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    refused_after: list[float] = field(default_factory=list)
    closed_streams: int = 0


class Files:
    """The access file and the server's certificate; files are replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.access = folder / "access.toml"
        self.credentials = grpc.ssl_channel_credentials(self._authority.cert_pem.bytes())

    @property
    def flags(self) -> Sequence[str]:
        """The server's command-line flags."""
        certificate, key = (str(self._folder / name) for name in ("certificate.pem", "key.pem"))
        return ("--access", str(self.access), "--tls-certificate", certificate, "--tls-key", key)

    def allow(self, *tokens: str) -> None:
        """Write an access file that accepts these tokens only."""
        digests = [sha256(token.encode()).hexdigest() for token in tokens]
        listed = ", ".join(f'"{digest}"' for digest in digests)
        text = f'[client.friend]\ntokens_sha256 = [{listed}]\noperations = ["infer"]\n'
        self._replace("access.toml", (text + '[anonymous]\noperations = ["health"]\n').encode())

    def certify(self) -> None:
        """Write a new key, then its certificate; until both are written, the server keeps the old pair."""
        own = self._authority.issue_cert("localhost", "127.0.0.1")
        self._replace("key.pem", own.private_key_pem.bytes())
        self._replace("certificate.pem", b"".join(pem.bytes() for pem in own.cert_chain_pems))

    def _replace(self, name: str, content: bytes) -> None:
        new = self._folder / f"{name}.new"
        new.write_bytes(content)
        new.replace(self._folder / name)


class Client:
    """Calls over `CHANNELS` connections, with the current `token`."""

    def __init__(self, port: int, files: Files) -> None:
        self._port, self._files = port, files
        self._exchange = payloads.grpc_exchange(MODEL, payloads.tensor(1, 16))
        self.token = ""
        self.changed = Changed()
        self._channels = [self._channel(number) for number in range(CHANNELS)]

    def _channel(self, number: int) -> grpc.aio.Channel:
        options = [("triglot.bench", number)]  # Channels with different options do not share a connection.
        return grpc.aio.secure_channel(f"127.0.0.1:{self._port}", self._files.credentials, options)

    async def call_steadily(self, number: int) -> None:
        """Call until cancelled; records each failure."""
        call = self._channels[number % CHANNELS].unary_unary(self._exchange.path)
        while True:
            try:
                await call(self._exchange.body, metadata=_bearer(self.token), timeout=PATIENCE)
                self.changed.answered += 1
            except grpc.aio.AioRpcError as error:
                self.changed.failed.append(f"{error.code().name}: {error.details()}")

    async def until(self, token: str, code: grpc.StatusCode) -> None:
        """Call with a token until a call on each connection ends with this code."""
        await asyncio.gather(*(self._until(channel, token, code) for channel in self._channels))

    async def _until(self, channel: grpc.aio.Channel, token: str, code: grpc.StatusCode) -> None:
        call = channel.unary_unary(self._exchange.path)
        async with asyncio.timeout(PATIENCE):
            while True:
                found = grpc.StatusCode.OK
                try:
                    await call(self._exchange.body, metadata=_bearer(token), timeout=PATIENCE)
                except grpc.aio.AioRpcError as error:
                    found = error.code()
                if found is code:
                    return
                await asyncio.sleep(0.01)  # Poll interval.

    async def stream_ends(self, token: str) -> None:
        """Open a stream with a token, and wait until it ends; counts it if its code is UNAUTHENTICATED."""
        call = self._channels[0].stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        stream = call(metadata=_bearer(token))
        await stream.write(self._exchange.body)
        await stream.read()
        with suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        if await stream.code() is grpc.StatusCode.UNAUTHENTICATED:
            self.changed.closed_streams += 1

    async def reconnect(self) -> None:
        """Make a call on a new connection, which gets the new certificate."""
        async with self._channel(-1 - self.changed.changes) as channel:
            await channel.unary_unary(self._exchange.path)(
                self._exchange.body, metadata=_bearer(self.token), timeout=PATIENCE
            )

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels:
            await channel.close()


def _bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


async def measure(changes: int, core: int | None) -> Changed:
    """So many changes of both."""
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        files = Files(Path(name))
        files.certify()
        files.allow("0")
        with rounds.serving_models(core, ("--workers", str(WORKERS), *files.flags)) as (server, port, _):
            await _all_serve(server)
            client = Client(port, files)
            client.token = "0"
            await client.until("0", grpc.StatusCode.OK)
            steady = [asyncio.create_task(client.call_steadily(n)) for n in range(CHANNELS * IN_FLIGHT)]
            try:
                await _change(client, files, changes)
            except TimeoutError:
                raise BenchError(f"a change was not in force after {PATIENCE:.0f} s") from None
            finally:
                for task in steady:
                    task.cancel()
                await asyncio.gather(*steady, return_exceptions=True)
                await client.close()
            return client.changed


async def _all_serve(server: Server) -> None:
    """Wait until both workers serve: connections are spread over the workers that listen."""
    async with asyncio.timeout(PATIENCE):
        while len(_SERVES.findall(server.log.read_text())) < WORKERS:  # noqa: ASYNC110 - there is no event.
            await asyncio.sleep(0.05)


async def _change(client: Client, files: Files, changes: int) -> None:
    for number in range(1, changes + 1):
        old, new = client.token, str(number)
        stream = asyncio.create_task(client.stream_ends(old))
        files.allow(old, new)
        files.certify()
        await client.until(new, grpc.StatusCode.OK)
        client.token = new
        await client.reconnect()
        await asyncio.sleep(0.05)  # Until the calls with the old token have ended; later ones have the new one.
        files.allow(new)
        removed = time.perf_counter()
        await client.until(old, grpc.StatusCode.UNAUTHENTICATED)
        client.changed.refused_after.append(time.perf_counter() - removed)
        await asyncio.wait_for(stream, PATIENCE)
        client.changed.changes += 1


def lines(changed: Changed) -> Iterator[str]:
    """Yield the lines to print."""
    after = changed.refused_after
    yield f"token and certificate changed {changed.changes} times, 2 workers, {CHANNELS * IN_FLIGHT} in flight:"
    yield f"  {changed.answered:,} calls answered, {len(changed.failed)} failed, goal 0"
    for text in sorted(set(changed.failed)):
        yield f"    {text}"
    median = statistics.median(after)
    yield f"  a removed token was refused everywhere after {median:.2f} s, at most {max(after):.2f}, goal 1"
    yield f"  {changed.closed_streams} of {changed.changes} open streams were ended for it"
