"""Names in clients' certificates, as `ssl` over both event loops and grpc's core tell them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
import uvloop
from cryptography import x509
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from tests.served_models import SECONDS
from tests.transports.tls_server import HOST, Authority
from triglot.transports.certificates import certificate_names, names_of, names_of_context

SPIFFE = "spiffe://prod/ns/ml/sa/deployer"
URI, DNS, EMAIL = x509.UniformResourceIdentifier, x509.DNSName, x509.RFC822Name


def ip(text: str) -> x509.IPAddress:
    return x509.IPAddress(ipaddress.ip_address(text))


def folder(name: str) -> x509.DirectoryName:
    return x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))


class Case(NamedTuple):
    """A certificate, and the names that it has for us."""

    expected: tuple[str, ...]
    alternative: Sequence[x509.GeneralName] = ()
    common: Sequence[str] = ()


CASES = {
    "none": Case(()),
    "SPIFFE": Case((SPIFFE,), [URI(SPIFFE)], ["deployer"]),
    "a name without dots": Case(("deployer",), [DNS("deployer")]),
    "of all kinds": Case(
        (SPIFFE, "urn:a:b", "a.example", "*.B.example", "user@a.example", "10.0.0.1", "2001:db8::1"),
        [
            ip("10.0.0.1"),
            EMAIL("user@a.example"),
            DNS("a.example"),
            URI(SPIFFE),
            ip("2001:db8::1"),
            URI("urn:a:b"),
            DNS("*.B.example"),
        ],
    ),
    "common": Case(("CN=deployer",), common=["deployer"]),
    "common, not ASCII": Case(("CN=M\xfcller \u732b",), common=["M\xfcller \u732b"]),
    "common, like a URI": Case((f"CN={SPIFFE}",), common=[SPIFFE]),
    "common beside others": Case(("a.example",), [DNS("a.example")], ["deployer"]),
    "common beside what is no name": Case(("CN=deployer",), [folder("other")], ["deployer"]),
    "two common": Case(("CN=first",), common=["first", "second"]),
    # What a CA that looks only at the kind could be brought to sign.
    "pretended": Case(
        (),
        [
            DNS(SPIFFE),
            DNS("10.0.0.1"),
            DNS("user@a.example"),
            DNS("CN=deployer"),
            DNS("a.example\0.evil"),
            URI("a.example"),
            URI("fe80::1"),
            URI("CN=deployer:x"),
            URI(SPIFFE + "\0"),
            URI("a:b c"),
            EMAIL._init_without_validation("spiffe://prod/user@a.example"),
            EMAIL._init_without_validation("CN=deployer@a.example"),
            EMAIL._init_without_validation("a.example"),
        ],
        ["deployer"],
    ),
}
Issued = tuple[bytes, bytes] | None


class Authorities:
    """The server's authority, and the certificates that it issued to clients."""

    def __init__(self, folder: Path) -> None:
        self.authority = authority = Authority(folder)
        self.server = authority.server(mutual=True)
        self.pair = tuple(Path(self.server[name]).read_bytes() for name in ("tls_key", "tls_certificate"))
        self.clients: list[Issued] = [authority.issue(*case[1], common=case.common) for case in CASES.values()]
        self.clients.append(None)

    def client(self, issued: Issued, at: Path) -> ssl.SSLContext:
        """Of a client with this certificate."""
        context = self.authority.client()
        context.check_hostname = False
        if issued is not None:
            at.write_bytes(b"".join(issued))
            context.load_cert_chain(at)
        return context


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(tmp_path_factory.mktemp("authorities"))


EXPECTED = [case.expected for case in CASES.values()]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_over_asyncio(
    loop: Callable[[], asyncio.AbstractEventLoop], authorities: Authorities, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authorities.server["tls_certificate"], authorities.server["tls_key"])
    context.load_verify_locations(authorities.server["tls_client_ca"])
    context.verify_mode = ssl.CERT_OPTIONAL
    found: list[tuple[str, ...]] = []

    def came(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.append(names_of(writer.transport))
        writer.write(b"1")
        writer.close()

    async def call() -> None:
        server = await asyncio.start_server(came, HOST, 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        for issued in authorities.clients:
            client = authorities.client(issued, tmp_path / "client.pem")
            reader, writer = await asyncio.open_connection(HOST, port, ssl=client)
            assert await asyncio.wait_for(reader.read(1), SECONDS) == b"1"
            writer.transport.abort()
        server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(call())
    assert found == [*EXPECTED, ()]


async def test_over_plain_connections() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        assert names_of(writer.transport) == ()
        writer.close()
        await writer.wait_closed()


async def test_over_grpc(authorities: Authorities) -> None:
    found: list[tuple[str, ...]] = []

    async def came(_: bytes, context: Any) -> bytes:
        found.append(names_of_context(context))
        return b""

    row = grpc.unary_unary_rpc_method_handler(came)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Call": row}),))
    roots = authorities.authority.pem
    secured = partial(grpc.ssl_server_credentials, [authorities.pair], roots)
    mutual, single = (server.add_secure_port(f"{HOST}:0", secured(required)) for required in (True, False))
    plain = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    for issued in authorities.clients:
        certificate, key = issued or (None, None)
        credentials = grpc.ssl_channel_credentials(roots, key, certificate)
        port = mutual if issued else single
        async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials) as channel:
            await channel.unary_unary("/t.T/Call")(b"", timeout=SECONDS)
    async with grpc.aio.insecure_channel(f"{HOST}:{plain}") as channel:
        await channel.unary_unary("/t.T/Call")(b"", timeout=SECONDS)
    await server.stop(None)
    assert found == [*EXPECTED, (), ()]


CONFUSING = ["::1", "10.0.0.1", "fe80::1", "CN=a@b", "CN=a:b", "a:b", "a.b", "a@b", "a:b@c"]


@given(st.text("aCN1.:@/*=-", min_size=1) | st.sampled_from(CONFUSING))
def test_names_of_different_kinds_are_never_equal(authorities: Authorities, text: str) -> None:
    issue = authorities.authority.issue
    issued = [
        issue(URI(text)),
        issue(DNS(text)),
        issue(EMAIL._init_without_validation(text)),
        issue(common=[text.removeprefix("CN=") or "a"]),
    ]
    names = [name for certificate, _ in issued for name in certificate_names(der(certificate))]
    assert len(names) == len(set(names))
    assert text in names or f"CN={text}" in names or text not in CONFUSING


def der(certificate: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.decode())


@given(st.data())
def test_bytes_that_are_no_certificate_have_no_names(authorities: Authorities, data: st.DataObject) -> None:
    """They cannot come from a handshake; should they, it is no server error."""
    certificate, _ = authorities.clients[list(CASES).index("of all kinds")] or (b"", b"")
    encoded = der(certificate)
    assert len(certificate_names(encoded)) == 7
    size = data.draw(st.integers(0, len(encoded) - 1))
    assert certificate_names(encoded[:size]) == ()
    assert certificate_names(encoded[:size] + b"\x80" * (len(encoded) - size)) in [(), EXPECTED[3]]
    assert isinstance(certificate_names(encoded[:size] + data.draw(st.binary())), tuple)
