"""TLS: who is served, with which certificate, and what is said of files that cannot be used."""

from __future__ import annotations

import asyncio
import codecs
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

import triglot
from tests.served_models import SECONDS
from tests.transports.h2_peers import Rows
from tests.transports.tls_server import HOST, TWICE, Authority, Key, infer, refused, rest, server
from triglot.config.options import Config, ConfigError
from triglot.telemetry.store import Telemetry
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.server import H2Server
from triglot.transports.tls import Tls

pytestmark = pytest.mark.both_transports

both = pytest.mark.parametrize("transport", ["aio", "h2"])
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@both
async def test_every_port_speaks_tls(transport: str, authority: Authority) -> None:
    async with server(grpc_transport=transport, **authority.server()) as here:
        async with authority.channel(here.grpc_port) as channel:
            assert await infer(channel) == TWICE
        assert await rest(here.rest_port, authority.client()) == [42]


@both
async def test_nothing_is_served_without(transport: str, authority: Authority) -> None:
    async with server(grpc_transport=transport, **authority.server()) as here:
        assert await refused(grpc.aio.insecure_channel(f"{HOST}:{here.grpc_port}")) is UNAVAILABLE
        for port in (here.grpc_port, here.rest_port):
            with pytest.raises(aiohttp.ClientError):
                await rest(port)
        async with authority.channel(here.grpc_port) as channel:
            assert await infer(channel) == TWICE


@both
async def test_client_that_trusts_another_authority(
    transport: str, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"))
    async with server(grpc_transport=transport, **authority.server()) as here:
        assert await refused(other.channel(here.grpc_port)) is UNAVAILABLE
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await rest(here.rest_port, other.client())


@both
async def test_certificates_of_clients(
    transport: str, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"))
    async with server(grpc_transport=transport, **authority.server(mutual=True)) as here:
        async with authority.channel(here.grpc_port, of=authority) as channel:
            assert await infer(channel) == TWICE
        assert await rest(here.rest_port, authority.client(of=authority)) == [42]
        for of in (None, other):
            assert await refused(authority.channel(here.grpc_port, of=of)) is UNAVAILABLE
            for port in (here.grpc_port, here.rest_port):
                with pytest.raises(aiohttp.ClientError):
                    await rest(port, authority.client(of=of))


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """The session of a new connection, which resumes the other one if the server lets it."""
    context.check_hostname = False
    with (
        socket.create_connection((HOST, port), SECONDS) as plain,
        context.wrap_socket(plain, session=session) as secured,
    ):
        secured.sendall(GET)
        assert secured.recv(12) == b"HTTP/1.1 200"  # TLS 1.3 has its tickets before.
        assert session is None or not secured.session_reused
        return secured.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_clients_certificate_is_checked_for_each_connection(
    version: ssl.TLSVersion, authority: Authority
) -> None:
    """A resumed session would not look whether the certificate has expired."""
    context = authority.client(of=authority)
    context.maximum_version = version
    async with server(**authority.server(mutual=True)) as here:
        session = await asyncio.to_thread(resumed, here.rest_port, context, None)
        await asyncio.to_thread(resumed, here.rest_port, context, session)


@both
async def test_files_with_a_byte_order_mark(transport: str, authority: Authority) -> None:
    """As Windows' editors save them."""
    options = authority.server(mutual=True)
    for file in map(Path, options.values()):
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    async with server(grpc_transport=transport, **options) as here:
        async with authority.channel(here.grpc_port, of=authority) as channel:
            assert await infer(channel) == TWICE
        assert await rest(here.rest_port, authority.client(of=authority)) == [42]


# --- keys that gRPC's clients refuse ---

KEYS: dict[str, tuple[Callable[[], Key], bool]] = {
    "RSA": (lambda: rsa.generate_private_key(65537, 2048), True),
    "P-256": (lambda: ec.generate_private_key(ec.SECP256R1()), True),
    "P-384": (lambda: ec.generate_private_key(ec.SECP384R1()), True),
    "P-521": (lambda: ec.generate_private_key(ec.SECP521R1()), False),
    "Ed25519": (ed25519.Ed25519PrivateKey.generate, False),
    "Ed448": (ed448.Ed448PrivateKey.generate, False),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_a_key_that_grpc_clients_refuse(
    kind: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """The log warns of those keys, and of no others, that gRPC's own client refuses; REST works with all."""
    make, accepted = KEYS[kind]
    options = authority.server()
    authority.replace_key(make())
    async with server(grpc_transport="h2", **options) as here:
        if accepted:
            async with authority.channel(here.grpc_port) as channel:
                assert await infer(channel) == TWICE
        else:
            assert await refused(authority.channel(here.grpc_port)) is UNAVAILABLE
        assert await rest(here.rest_port, authority.client()) == [42]
    warned = [record.getMessage() for record in caplog.records if "gRPC's clients refuse" in record.getMessage()]
    expected = f"has a key of type {kind}, which gRPC's clients refuse; they accept RSA, P-256, P-384"
    assert len(warned) == (not accepted)
    assert all(expected in line for line in warned)


async def test_a_renewed_key_that_grpc_clients_refuse(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(Config(**authority.server()))  # type: ignore[arg-type]  # Texts.
    assert tls.refused_by_grpc() == ""
    authority.replace_key(ed25519.Ed25519PrivateKey.generate())
    assert tls.renew()
    assert "has a key of type Ed25519" in caplog.text


# --- renewed files ---


async def shown(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection(HOST, port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()  # The server's goodbye may take longer than the test.
    return certificate


@both
async def test_a_renewed_certificate_is_for_new_connections(transport: str, authority: Authority) -> None:
    async with (
        server(grpc_transport=transport, **authority.server()) as here,
        authority.channel(here.grpc_port) as channel,
    ):
        ports = (here.grpc_port, here.rest_port)
        before = [await shown(port, authority.client("h2")) for port in ports]
        assert before[0] == before[1]
        assert await infer(channel) == TWICE
        authority.server()
        after = [await shown(port, authority.client("h2")) for port in ports]
        assert after[0] == after[1] != before[0]
        assert await infer(channel) == TWICE


@both
async def test_files_that_are_renewed_one_by_one(
    transport: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with server(grpc_transport=transport, **authority.server()) as here:
        before = await shown(here.grpc_port, authority.client("h2"))
        old_key = authority.key()
        authority.server()
        new_key = authority.key(old_key)
        with caplog.at_level(logging.WARNING):
            assert await shown(here.grpc_port, authority.client("h2")) == before
        assert "is not the key of tls_certificate" in caplog.text
        authority.key(new_key)
        assert await shown(here.grpc_port, authority.client("h2")) != before


@both
async def test_a_renewed_ca_of_clients_is_for_new_connections(
    transport: str, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"))
    options = authority.server(mutual=True)
    async with (
        server(grpc_transport=transport, **options) as here,
        authority.channel(here.grpc_port, of=authority) as channel,
    ):
        assert await infer(channel) == TWICE
        other.ca.cert_pem.write_to_path(options["tls_client_ca"])
        async with authority.channel(here.grpc_port, of=other) as new:
            assert await infer(new) == TWICE
        assert await rest(here.rest_port, authority.client(of=other)) == [42]
        assert await refused(authority.channel(here.grpc_port, of=authority)) is UNAVAILABLE
        with pytest.raises(aiohttp.ClientError):
            await rest(here.rest_port, authority.client(of=authority))
        assert await infer(channel) == TWICE


# --- ALPN ---


async def first_bytes(port: int, context: ssl.SSLContext, data: bytes = b"") -> bytes:
    """What a TLS client gets that says something."""
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    writer.write(data)
    got = await asyncio.wait_for(reader.read(1000), SECONDS)
    writer.close()
    return got


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("offered", [(), ("http/1.1",), ("http/0.9",), ("http/1.1", "grpc-exp")])
async def test_who_does_not_offer_http2_speaks_http1(offered: tuple[str, ...], authority: Authority) -> None:
    async with server(grpc_transport="h2", **authority.server()) as here:
        for port in (here.grpc_port, here.rest_port):
            assert (await first_bytes(port, authority.client(*offered), GET)).startswith(b"HTTP/1.1 200 OK")
        # Not HTTP/2, whatever is said then.
        answer = await first_bytes(here.grpc_port, authority.client(*offered), frames.PREFACE)
        assert answer.startswith(b"HTTP/1.")


async def test_who_offers_http2_speaks_it(authority: Authority) -> None:
    async with server(grpc_transport="h2", **authority.server()) as here:
        settings = await first_bytes(here.grpc_port, authority.client("h2"), GET)
        assert settings[3] == frames.SETTINGS
        assert frames.read_settings(memoryview(settings[frames.HEAD_BYTES :][: int.from_bytes(settings[:3])]))


@pytest.mark.parametrize("offered", [(), ("http/1.1",), ("grpc-exp",)])
async def test_grpc_only_port_refuses_other_protocols(offered: tuple[str, ...], authority: Authority) -> None:
    config = Config(grpc_port=0, rest_port=-1, grpc_transport="h2", **authority.server())  # type: ignore[arg-type]  # Texts.
    here = H2Server([Rows().service()], config, Telemetry())
    port = await here.start()
    try:
        with pytest.raises((ConnectionError, AssertionError)):
            assert await first_bytes(port, authority.client(*offered), frames.PREFACE)
        async with authority.channel(port) as channel:
            assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
    finally:
        await here.stop()


async def test_tls_is_to_begin_soon(authority: Authority) -> None:
    config = Config(grpc_port=0, rest_port=-1, grpc_transport="h2", **authority.server())  # type: ignore[arg-type]  # Texts.
    here = H2Server([Rows().service()], config, Telemetry(), Limits(settings_timeout=0.05))
    port = await here.start()
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        except ConnectionError:
            pass
        writer.close()
    finally:
        await here.stop()


# --- files that cannot be used ---


def wrong(options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        Tls(Config(**options))  # type: ignore[arg-type]  # Texts.
    return str(caught.value)


@pytest.mark.parametrize("name", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_missing_or_invalid_pem_file(name: str, authority: Authority, tmp_path: Path) -> None:
    options = authority.server(mutual=True)
    missing = tmp_path / "none"
    assert wrong(options | {name: str(missing)}) == f"{name}: cannot read {missing}: No such file or directory"
    other = options["tls_certificate" if name == "tls_key" else "tls_key"]
    thing = "private key" if name == "tls_key" else "certificate"
    assert wrong(options | {name: other}) == f"{name}: expected a {thing} in PEM, but {other} has none"


def test_a_key_of_another_certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> None:
    options = authority.server()
    key = Authority(tmp_path_factory.mktemp("other")).server()["tls_key"]
    text = wrong(options | {"tls_key": key})
    assert text == f"tls_key: {key} is not the key of tls_certificate {options['tls_certificate']}"


def test_a_key_with_a_passphrase(authority: Authority, tmp_path: Path) -> None:
    options = authority.server()
    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key(Path(options["tls_key"]).read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    assert wrong(options | {"tls_key": str(locked)}) == (
        f"tls_key: {locked} has a passphrase, expected a key without one"
    )


@pytest.mark.parametrize("name", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_a_damaged_file(name: str, authority: Authority, tmp_path: Path) -> None:
    options = authority.server(mutual=True)
    damaged = tmp_path / "damaged"
    lines = Path(options[name]).read_text().splitlines(keepends=True)
    damaged.write_text("".join([lines[0], "AAAA\n", *lines[2:]]))
    text = wrong(options | {name: str(damaged)})
    assert name in text
    assert str(damaged) in text


@both
async def test_nothing_is_loaded_for_a_server_that_cannot_start(
    transport: str, authority: Authority, tmp_path: Path
) -> None:
    options = authority.server() | {"tls_key": str(tmp_path / "none"), "grpc_transport": transport}
    config = Config(grpc_port=0, rest_port=0, **options)  # type: ignore[arg-type]  # Texts.
    started = triglot.Server([tmp_path / "no repository"], config)
    with pytest.raises(ConfigError, match="tls_key: cannot read"):
        await started.start()


FILES, CA = {"tls_certificate": "c", "tls_key": "k"}, {"tls_client_ca": "a"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tls_key": "k"}, "expected both tls_certificate and tls_key, or neither, got one of them"),
        ({"tls_certificate": "c"}, "expected both tls_certificate and tls_key, or neither, got one of them"),
        ({"tls_client_ca": "a"}, "tls_client_ca: needs tls_certificate and tls_key"),
        ({"tls_client_auth": "optional"}, "tls_client_auth: optional needs tls_client_ca"),
        ({"tls_client_auth": "required"} | FILES, "tls_client_auth: required needs tls_client_ca"),
        (
            {"tls_client_auth": "none"} | FILES | CA,
            "tls_client_auth: expected no tls_client_ca with none, got one",
        ),
        (
            {"tls_client_auth": "optional"} | FILES | CA,
            "tls_client_auth: optional needs access, which says what clients without a certificate may do",
        ),
        (
            {"tls_client_auth": "optional", "access": "a", "grpc_transport": "aio"} | FILES | CA,
            "tls_client_auth: optional needs grpc_transport h2, as aio can only ask for what it requires",
        ),
        (
            {"tls_client_auth": "always"} | FILES | CA,
            "tls_client_auth: expected none, optional or required, got 'always'",
        ),
    ],
)
def test_options_that_say_too_little(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**options)  # type: ignore[arg-type]  # Texts.
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "none"),
        ({"tls_client_auth": "none"} | FILES, "none"),
        (FILES | CA, "required"),
        ({"tls_client_auth": "required", "grpc_transport": "aio"} | FILES | CA, "required"),
        ({"tls_client_auth": "optional", "access": "a", "grpc_transport": "h2"} | FILES | CA, "optional"),
        # Where grpc.aio has no port with TLS, it need not ask.
        (
            {"tls_client_auth": "optional", "access": "a", "grpc_transport": "aio", "grpc_port": -1} | FILES | CA,
            "optional",
        ),
    ],
)
def test_whether_clients_need_a_certificate(options: dict[str, Any], expected: str) -> None:
    assert Config(**options).client_auth == expected
