"""The kubelet's probes against a server with TLS: they bring no certificate, and verify none.

As pkg/probe/http and pkg/probe/grpc of Kubernetes send them; mode TLS of gRPC probes is alpha in 1.37.
"""

from __future__ import annotations

import asyncio
import platform
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from cryptography import x509

import triglot
from tests import environments
from tests.access.access_files import anonymous, write
from tests.served_models import SECONDS
from tests.transports.h2_peers import Client, greeting
from tests.transports.tls_server import HOST, TWICE, Authority, infer, server
from triglot.transports.http2.core import frames

AGENT = "kube-probe/1.37"
PROTOS = Path(__file__).parents[2] / "protos"
SPIFFE = "spiffe://prod/ns/ml/sa/search"
TABLES = [
    f'[client.search]\ncertificates = ["{SPIFFE}"]\noperations = ["infer"]\n',
    '[client.ops]\ncertificates = ["CN=ops"]\noperations = ["infer"]\n',
]
Transports = dict[str, Any]
H2: Transports = {"grpc_transport": "h2", "http_transport": "h1"}
AIO: Transports = {"grpc_transport": "aio", "http_transport": "aiohttp"}
ONLY_REST: Transports = AIO | {"grpc_port": -1}
Issued = tuple[bytes, bytes]


# --- the kubelet ---


async def http_get(port: int, path: str = "/v2/health/ready", tls: ssl.SSLContext | None = None) -> int:
    """The status of an HTTPS probe, by the version of HTTP that the server chooses; 0 without an answer."""
    if tls is None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        tls.set_alpn_protocols(["h2", "http/1.1"])
    try:
        reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
        secured: ssl.SSLObject = writer.get_extra_info("ssl_object")
        if secured.selected_alpn_protocol() == "h2":
            return await _http2_get(Client(reader, writer), f"{HOST}:{port}", path)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nUser-Agent: {AGENT}\r\nAccept: */*\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.transport.abort()
    except OSError:
        return 0
    return int(answer[9:12]) if answer else 0


async def _http2_get(client: Client, host: str, path: str) -> int:
    fields = {":authority": host, ":method": "GET", ":path": path, ":scheme": "https"}
    fields |= {"accept": "*/*", "user-agent": AGENT}
    await client.send(
        greeting(enable_push=0, initial_window_size=4 << 20, max_header_list_size=10 << 20),
        frames.window_update(0, 1 << 30),
        client.raw_headers(1, list(fields.items()), frames.END_HEADERS | frames.END_STREAM),
    )
    status = 0
    while not status and (got := await client.frame()) is not None:
        if got.kind == frames.HEADERS:
            status = int(client.fields(got.payload)[":status"])
    client.writer.transport.abort()
    return status


async def grpc_check(port: int, mode: str, method: str = "grpc.health.v1.Health/Check") -> str:
    """What grpc-go, which the kubelet uses, says to a call without a certificate."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the wheel of grpcurl is for Linux on x86-64")
    grpcurl = await asyncio.to_thread(environments.python, "grpcurl")
    flags = ["-user-agent", AGENT, "-max-time", str(SECONDS), "-connect-timeout", "5", "-d", "{}"]
    protos = [
        "-import-path",
        str(PROTOS),
        "-proto",
        "grpc/health/v1/health.proto",
        "-proto",
        "kserve/inference.proto",
    ]
    process = await asyncio.create_subprocess_exec(
        grpcurl.with_name("grpcurl"),
        mode,
        *flags,
        *protos,
        f"{HOST}:{port}",
        method,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode()


# --- the server ---


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def secured(authority: Authority, *tables: str, **options: Any) -> AsyncIterator[triglot.Server]:
    """With a CA for clients, and an access file of these tables and those above."""
    file = write(authority.folder / "access.toml", *TABLES, *tables)
    async with server(**authority.server(mutual=True), access=str(file), **options) as here:
        yield here


def ports(here: triglot.Server) -> list[int]:
    return [port for port in (here.grpc_port, here.rest_port) if port]


def rest_ports(here: triglot.Server, transport: Transports) -> list[int]:
    return ports(here) if transport is H2 else [here.rest_port]


@pytest.fixture(params=[H2, ONLY_REST], ids=["h2", "REST alone"])
def transport(request: pytest.FixtureRequest) -> Transports:
    """Those that can ask for certificates without requiring them."""
    return request.param  # type: ignore[no-any-return]


async def test_https_probes_see_health_and_nothing_else(transport: Transports, authority: Authority) -> None:
    async with secured(authority, anonymous(["health"]), tls_client_auth="optional", **transport) as here:
        for port in rest_ports(here, transport):
            for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/twice/ready"):
                assert await http_get(port, path) == 200
            for path in ("/v2", "/v2/models/twice", "/metrics", "/v2/logging", "/v2/models/stats"):
                assert await http_get(port, path) == 401
            assert await http_get(port, "/none") == 404


async def test_grpc_probes_with_tls_see_health_and_nothing_else(authority: Authority) -> None:
    async with secured(authority, anonymous(["health"]), tls_client_auth="optional", **H2) as here:
        assert '"status": "SERVING"' in await grpc_check(here.grpc_port, "-insecure")
        for name in ("ServerMetadata", "ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "LogSettings"):
            output = await grpc_check(here.grpc_port, "-insecure", f"inference.GRPCInferenceService/{name}")
            assert "Code: Unauthenticated" in output, name


async def test_plaintext_grpc_probes_need_a_server_without_tls(authority: Authority, tmp_path: Path) -> None:
    async with secured(authority, anonymous(["health"]), tls_client_auth="optional", **H2) as here:
        assert "SERVING" not in await grpc_check(here.grpc_port, "-plaintext")
    file = write(tmp_path / "access.toml", anonymous(["health"]))
    async with server(access=str(file), **H2) as here:
        assert '"status": "SERVING"' in await grpc_check(here.grpc_port, "-plaintext")


async def test_probes_that_the_access_file_does_not_let_in(transport: Transports, authority: Authority) -> None:
    async with secured(authority, tls_client_auth="optional", **transport) as here:
        for port in rest_ports(here, transport):
            assert await http_get(port) == 401
        if here.grpc_port:
            assert "Code: Unauthenticated" in await grpc_check(here.grpc_port, "-insecure")


@pytest.mark.parametrize("options", [{}, {"tls_client_auth": "required"}], ids=["by default", "required"])
@pytest.mark.parametrize("transport", [H2, AIO], ids=["h2", "aio"])
async def test_where_a_certificate_is_required_probes_get_no_answer(
    transport: Transports, options: dict[str, str], authority: Authority
) -> None:
    async with secured(authority, anonymous(["health"]), **options, **transport) as here:
        for port in ports(here):
            assert await http_get(port) == 0
        assert "SERVING" not in await grpc_check(here.grpc_port, "-insecure")
        issued = authority.client(of=authority)
        issued.check_hostname = False
        assert await http_get(here.rest_port, tls=issued) == 200


# --- everybody else ---


async def rest_infer(authority: Authority, port: int, issued: Issued | None) -> int:
    """The status; 0 without an answer."""
    context = authority.client()
    if issued is not None:
        file = authority.folder / "client.pem"
        file.write_bytes(b"".join(issued))
        context.load_cert_chain(file)
    body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [21]}]}
    url = f"https://{HOST}:{port}/v2/models/twice/infer"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session:
        try:
            async with session.post(url, json=body, ssl=context) as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0


async def grpc_infer(authority: Authority, port: int, issued: Issued | None) -> grpc.StatusCode:
    certificate, key = issued or (None, None)
    credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options) as channel:
        try:
            assert await infer(channel) == TWICE
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("transport", "auth"),
    [(H2, "optional"), (ONLY_REST, "optional"), (H2, "required"), (AIO, "required")],
    ids=["h2, optional", "REST alone, optional", "h2, required", "aio, required"],
)
async def test_who_has_a_certificate(
    transport: Transports, auth: str, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    uri = x509.UniformResourceIdentifier
    unauthenticated, unreachable = (401, grpc.StatusCode.UNAUTHENTICATED), (0, grpc.StatusCode.UNAVAILABLE)
    cases = [
        (authority.issue(uri(SPIFFE)), (200, grpc.StatusCode.OK)),
        (authority.issue(uri("spiffe://other"), uri(SPIFFE), common=["x"]), (200, grpc.StatusCode.OK)),
        (authority.issue(common=["ops"]), (200, grpc.StatusCode.OK)),
        (authority.issue(x509.DNSName("other"), common=["ops"]), unauthenticated),
        (authority.issue(uri(SPIFFE + "/x")), unauthenticated),
        (authority.issue(uri(SPIFFE + "\0")), unauthenticated),
        (authority.issue(x509.DNSName(SPIFFE)), unauthenticated),
        (authority.issue(common=[SPIFFE]), unauthenticated),
        (stranger.issue(uri(SPIFFE)), unreachable),
        (None, unauthenticated if auth == "optional" else unreachable),
    ]
    async with secured(authority, anonymous(["health"]), tls_client_auth=auth, **transport) as here:
        for number, (issued, expected) in enumerate(cases):
            for port in rest_ports(here, transport):
                assert await rest_infer(authority, port, issued) == expected[0], (number, port)
            if here.grpc_port:
                assert await grpc_infer(authority, here.grpc_port, issued) is expected[1], number
