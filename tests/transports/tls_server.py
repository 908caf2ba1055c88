"""Certificates of a test's own, and a server with them behind its real ports."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc.aio
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

import triglot
from tests.served_models import SECONDS, Function, serving, twice
from triglot.pb.kserve import inference_pb2 as pb

HOST = "127.0.0.1"
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey


class Authority:
    """Vouches for certificates, which lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self.ca.cert_pem.bytes()

    def server(self, *, mutual: bool = False) -> dict[str, str]:
        """Write a certificate for this machine; the options that name it."""
        issued = self.ca.issue_cert("localhost", HOST)
        certificate, key, ca = (self.folder / name for name in ("server.pem", "server.key", "ca.pem"))
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        self.ca.cert_pem.write_to_path(ca)
        named = {"tls_certificate": str(certificate), "tls_key": str(key)}
        return named | ({"tls_client_ca": str(ca)} if mutual else {})

    def issue(self, *names: x509.GeneralName, common: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """A certificate with just these names, whether they make sense or not, and its key."""
        return self._issue(ec.generate_private_key(ec.SECP256R1()), names, common)

    def replace_key(self, key: Key) -> None:
        """Write a certificate for this machine and this key in place of the server's."""
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
        certificate, secret = self._issue(key, names, ())
        (self.folder / "server.pem").write_bytes(certificate)
        (self.folder / "server.key").write_bytes(secret)

    def _issue(self, key: Key, names: Sequence[x509.GeneralName], common: Sequence[str]) -> tuple[bytes, bytes]:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            x509.load_pem_x509_certificate(self.pem).subject,
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text) for text in common]),
            key.public_key(),
            x509.random_serial_number(),
            now - timedelta(hours=1),
            now + timedelta(hours=1),
        )
        if names:
            # Critical without a subject (RFC 5280, 4.2.1.6): clients since Python 3.13 are strict.
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not common)
        loaded = serialization.load_pem_private_key(self.ca.private_key_pem.bytes(), None)
        signing = cast("ec.EllipticCurvePrivateKey", loaded)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
        certificate = builder.add_extension(issuer, critical=False).sign(signing, hashes.SHA256())
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), secret

    def key(self, other: bytes | None = None) -> bytes:
        """The server's key, in the place of which `other` is written."""
        file = self.folder / "server.key"
        before = file.read_bytes()
        if other is not None:
            file.write_bytes(other)
        return before

    def client(self, *protocols: str, of: Authority | None = None) -> ssl.SSLContext:
        """What a client trusts, and offers by ALPN; with a certificate of its own by authority `of`."""
        # With `cadata` it does not read the system's authorities, which takes long.
        context = ssl.create_default_context(cadata=self.pem.decode())
        if protocols:
            context.set_alpn_protocols(list(protocols))
        if of is not None:
            of.ca.issue_cert("client@here").configure_cert(context)
        return context

    def channel(self, port: int, of: Authority | None = None) -> grpc.aio.Channel:
        """gRPC's own client, as `client`."""
        issued = None if of is None else of.ca.issue_cert("client@here")
        credentials = grpc.ssl_channel_credentials(
            self.pem,
            None if issued is None else issued.private_key_pem.bytes(),
            None if issued is None else issued.cert_chain_pems[0].bytes(),
        )
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        return grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options)


@asynccontextmanager
async def server(**options: Any) -> AsyncIterator[triglot.Server]:
    """Serve the model `twice`."""
    async with serving({"twice": Function(twice)}, **options) as here:
        yield here.server


async def infer(channel: grpc.aio.Channel) -> bytes:
    """Call the model; the answer's values."""
    request = pb.ModelInferRequest(model_name="twice", raw_input_contents=[(21).to_bytes(4, "little")])
    request.inputs.add(name="x", datatype="INT32", shape=[1])
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer", response_deserializer=pb.ModelInferResponse.FromString
    )
    answer = await call(request.SerializeToString(), timeout=SECONDS)
    return bytes(answer.raw_output_contents[0])


TWICE = (42).to_bytes(4, "little")


async def refused(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """The status of a call that does not come through."""
    async with channel:
        try:
            await infer(channel)
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError("it came through")


async def rest(port: int, context: ssl.SSLContext | None = None) -> Any:
    """Call the model over REST; the answer's values."""
    body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [21]}]}
    scheme = "http" if context is None else "https"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session,
        session.post(
            f"{scheme}://{HOST}:{port}/v2/models/twice/infer", json=body, ssl=context or False
        ) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["outputs"][0]["data"]
