"""Proxies before the server, by the configurations of docs/proxies.md: foreign clients' gRPC, and REST."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import ssl
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from tests.e2e.foreign.cases import Json, cases
from tests.e2e.foreign.clients import CLIENTS, MODELS, Connection, Outcomes, run_cases
from tests.e2e.proxies import PROXIES, Proxy, running
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS, SECONDS, unused_ports
from tests.transports.live import METHOD, streaming
from tests.transports.tls_server import Authority
from triglot.pb.kserve import inference_pb2 as pb

CALLS = [case.name for case in cases("") if "plain" in case.over]
CONNECTIONS = [case.name for case in cases("") if {"keepalive", "aging"} & set(case.over)]
"""Cases of the table that a proxy changes; all are over its TLS."""
HOST = "models.example.com"
MIB = 1 << 20
STREAMS = {"Apache": 6}
"""Open streams of one connection that a proxy allows; 200 if it is not here."""
pytestmark = pytest.mark.long
each_proxy = pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)


class Proxies:
    """Servers, and a proxy before each once it is asked for.

    `plain` has the transport that was chosen, `own` our own, and `aging` ends connections after a second.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        authority = Authority(folder)
        authority.server()
        shutil.copy(folder / "server.pem", folder / "server.crt")
        self.folder, self.stack = folder, stack
        self.ca = authority.pem
        self.context = ssl.create_default_context(cadata=self.ca.decode())
        self.plain = self.server()
        self.own = self.server("--grpc-transport=h2", "--http-transport=h1")
        self.aging = self.server("--max-connection-age=1")
        self.port = cache(self._port)
        self.outcomes = cache(self._outcomes)

    def server(self, *arguments: str) -> ServerProcess:
        """Run a server with the models of the table."""
        loaded = "--load-model=identity_uint8,half_plus_two,token_stream,steps,seen,failing"
        server = ServerProcess(
            str(PLAIN_MODELS),
            str(MODELS),
            "--model-control-mode=explicit",
            loaded,
            "--grpc-compression=gzip",
            f"--allowed-hosts={HOST}",
            *arguments,
        )
        return self.stack.enter_context(server)

    def _port(self, proxy: Proxy, server: ServerProcess) -> int:
        return self.stack.enter_context(running(proxy, self.folder, server.grpc_address, server.rest_address))

    def _outcomes(self, proxy: Proxy, over: str) -> Outcomes:
        """Return the results of the table's cases for a connection, through a proxy."""
        table = [case for case in cases(f"{proxy.name} {uuid.uuid4()}") if over in case.over]
        port = self.port(proxy, self.aging if over == "aging" else self.plain)
        ca, milliseconds = str(self.folder / "ca.pem"), 1000 if over == "keepalive" else 0
        return run_cases(CLIENTS[0], Connection(f"127.0.0.1:{port}", ca, keepalive_ms=milliseconds), table)

    def channel(self, port: int) -> grpc.aio.Channel:
        """Open a channel to a proxy."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(self.ca), options)

    @asynccontextmanager
    async def session(self, port: int) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield a client of a proxy's REST."""
        connector = aiohttp.TCPConnector(ssl=self.context)
        root = f"https://127.0.0.1:{port}"
        async with aiohttp.ClientSession(root, connector=connector, headers={"host": HOST}) as session:
            yield session


@pytest.fixture(scope="module")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxies]:
    with ExitStack() as stack:
        yield Proxies(tmp_path_factory.mktemp("proxies"), stack)


@pytest.mark.both_transports
@pytest.mark.parametrize("name", CALLS)
@each_proxy
def test_grpc_calls(proxy: Proxy, name: str, proxies: Proxies) -> None:
    (case,) = (case for case in cases("") if case.name == name)
    case.check(proxies.outcomes(proxy, "plain")[name])


@pytest.mark.parametrize("name", CONNECTIONS)
@each_proxy
def test_grpc_connections(proxy: Proxy, name: str, proxies: Proxies) -> None:
    (case,) = (case for case in cases("") if case.name == name)
    case.check(proxies.outcomes(proxy, case.over[0])[name])


@each_proxy
async def test_streams_at_once_and_large_metadata(proxy: Proxy, proxies: Proxies) -> None:
    count = STREAMS.get(proxy.name, 200)
    request = pb.ModelInferRequest(model_name="steps")
    for name, value in (("n", 1), ("ms", 0)):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1])
        tensor.contents.int_contents.append(value)
    async with proxies.channel(proxies.port(proxy, proxies.own)) as channel:
        calls = [streaming(channel)(timeout=SECONDS) for _ in range(count)]
        for call in calls:
            await call.write(request.SerializeToString())
        assert all([await call.read() for call in calls])
        for call in calls:
            await call.done_writing()
        assert {await call.code() for call in calls} == {grpc.StatusCode.OK}
        alive = channel.unary_unary(METHOD + "ServerLive")
        await alive(b"", metadata=[("x-large-bin", bytes(11_500))], timeout=SECONDS)


@each_proxy
def test_server_that_is_away(proxy: Proxy, proxies: Proxies, tmp_path: Path) -> None:
    for name in ("server.crt", "server.key"):
        shutil.copy(proxies.folder / name, tmp_path)
    addresses = [f"127.0.0.1:{port}" for port in unused_ports()]
    with running(proxy, tmp_path, *addresses) as port:
        credentials = grpc.ssl_channel_credentials(proxies.ca)
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(METHOD + "ServerLive")(b"", timeout=SECONDS)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        url = f"https://127.0.0.1:{port}/v2/health/ready"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, context=proxies.context, timeout=SECONDS)
        with refused.value:
            assert refused.value.code in (502, 503)


# --- REST ---


async def v2_json(session: aiohttp.ClientSession) -> None:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, 3], "data": [1, 2, 3]}
    async with session.post("/v2/models/identity_uint8/infer", json={"inputs": [tensor]}) as response:
        assert (await response.json())["outputs"] == [{**tensor, "name": "y"}]


async def tensorflow_serving(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/models/half_plus_two:predict", json={"instances": [1.0, 2.0]}) as response:
        assert await response.json() == {"predictions": [2.5, 3.0]}


async def error(session: aiohttp.ClientSession) -> None:
    async with session.post("/v2/models/unknown/infer", json={}) as response:
        assert response.status == 404
        assert "unknown" in (await response.json())["error"]


async def binary(session: aiohttp.ClientSession, size: int, *, chunked: bool = False) -> None:
    """Sends a tensor of so many bytes and gets it back; `chunked` after 100 Continue, without Content-Length."""
    parameters = {"binary_data_size": size}
    tensor: Json = {"name": "x", "datatype": "UINT8", "shape": [1, size], "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = head + bytes(range(256)) * (size // 256)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), MIB):
            yield body[at : at + MIB]

    async with session.post(
        "/v2/models/identity_uint8/infer",
        data=pieces() if chunked else io.BytesIO(body),
        headers={"Inference-Header-Content-Length": str(len(head))},
        expect100=chunked,
    ) as response:
        received = await response.read()
    assert response.status == 200, received
    assert received[int(response.headers["Inference-Header-Content-Length"]) :] == body[len(head) :]


async def events(session: aiohttp.ClientSession) -> None:
    """The first one arrives while the model runs, which ends when the client disconnects."""
    request_id = str(uuid.uuid4())
    steps = {"n": 3000, "ms": 20, "id": request_id}
    async with session.post("/v2/models/steps/generate_stream", json=steps) as response:
        assert response.content_type == "text/event-stream"
        assert (await response.content.readline()).startswith(b"data: ")
    is_closed = {"n": -1, "ms": 20_000, "id": request_id}
    async with session.post("/v2/models/steps/generate", json=is_closed) as response:
        assert (await response.json())["step"] == 1


REST: dict[str, Callable[[aiohttp.ClientSession], object]] = {
    "V2 JSON": v2_json,
    "TensorFlow Serving": tensorflow_serving,
    "error": error,
    "5 MiB": lambda session: binary(session, 5 * MIB),
    "5 MiB in chunks": lambda session: binary(session, 5 * MIB, chunked=True),
    "64 MiB": lambda session: binary(session, 64 * MIB),
    "events": events,
}


@pytest.mark.parametrize("name", REST)
@each_proxy
async def test_rest(proxy: Proxy, name: str, proxies: Proxies) -> None:
    call = REST[name]
    async with proxies.session(proxies.port(proxy, proxies.own)) as session, asyncio.timeout(SECONDS):
        await call(session)  # type: ignore[misc]
