"""An issuer that signs JWTs, and a server with the keys."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import get_default_algorithms

ISSUER, AUDIENCE = "https://issuer.example", "triglot"
CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}


@cache
def private_key(algorithm: str, name: str) -> Any:
    """The same for the same name: some take long to make."""
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm])
    if algorithm == "EdDSA":
        return ed448.Ed448PrivateKey.generate() if name == "ed448" else ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Signer:
    """Has one key, of the name `kid`."""

    def __init__(self, kid: str = "one", algorithm: str = "RS256") -> None:
        self.kid, self.algorithm = kid, algorithm
        self.key = private_key(algorithm, kid)

    @property
    def jwk(self) -> dict[str, Any]:
        """The public key, as issuers publish it."""
        public = self.key.public_key()
        made = json.loads(get_default_algorithms()[self.algorithm].to_jwk(public))
        if self.algorithm in CURVES:  # PyJWT 2.8 leaves zeros out, which have to be there (RFC 7518 6.2.1.2).
            numbers, size = public.public_numbers(), (public.key_size + 7) // 8
            made |= {axis: part(getattr(numbers, axis).to_bytes(size, "big")) for axis in "xy"}
        return {**made, "kid": self.kid, "alg": self.algorithm, "use": "sig"}

    @property
    def pem(self) -> bytes:
        """The public key."""
        public = self.key.public_key()
        return bytes(
            public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )

    def token(self, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A good one but for what is given; None takes a claim, or a field of the header, away."""
        fields = {"kid": self.kid, "typ": "JWT", "alg": self.algorithm, **(header or {})}
        return self.signed(without_none(fields), claims_of(**claims))

    def signed(self, header: Any, claims: Any) -> str:
        """Of anything that JSON has, or bytes."""
        text = f"{part(header)}.{part(claims)}"
        signature = get_default_algorithms()[self.algorithm].sign(text.encode(), self.key)
        return f"{text}.{part(signature)}"


def claims_of(**claims: Any) -> dict[str, Any]:
    """Good ones but for what is given."""
    now = int(time.time())
    good = {"iss": ISSUER, "aud": AUDIENCE, "sub": "somebody", "iat": now, "nbf": now, "exp": now + 600}
    return without_none(good | claims)


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """What is not None."""
    return {name: value for name, value in table.items() if value is not None}


def part(value: Any) -> str:
    """One of a token's three."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def keyset(*signers: Signer) -> bytes:
    """What is in a file, or behind a URL."""
    return json.dumps({"keys": [signer.jwk for signer in signers]}).encode()


def hmac_token(secret: bytes, **claims: Any) -> str:
    """Signed with a shared secret. PyJWT refuses a public key as one, but an attacker does not ask it."""
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    text = f"{part({'alg': 'HS256', 'kid': 'one'})}.{part(claims_of(**claims))}"
    return f"{text}.{part(algorithm.sign(text.encode(), secret))}"


class KeyServer(ThreadingHTTPServer):
    """Answers `content` with `status` and `headers`, once `gate` is open."""

    daemon_threads = True

    def __init__(self, content: bytes = b"", status: int = 200, **headers: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.status, self.headers = content, status, headers
        self.gate, self.asked = threading.Event(), threading.Event()
        self.gate.set()
        self.seen: list[dict[str, str]] = []
        self.scheme = "http"

    @property
    def url(self) -> str:
        """Of the keys."""
        return f"{self.scheme}://localhost:{self.server_port}/openid/v1/jwks"

    def handle_error(self, *_: Any) -> None:
        """Clients of tests leave."""


class _Handler(BaseHTTPRequestHandler):
    server: KeyServer

    def do_GET(self) -> None:
        self.server.seen.append({name.lower(): value for name, value in self.headers.items()})
        self.server.asked.set()
        self.server.gate.wait()
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: Any) -> None:
        """No text is readable."""


@contextmanager
def key_server(content: bytes = b"", status: int = 200, *, tls: Any = None, **headers: str) -> Iterator[KeyServer]:
    """On loopback. `tls`: the certificate, of trustme, that it shows."""
    with KeyServer(content, status, **headers) as server:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.scheme = "https"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.gate.set()
            server.shutdown()
            thread.join()


def issuer(name: str, jwks: str | Path, **more: object) -> str:
    """An issuer's table; `more` are further keys, with their values in TOML, in place of the usual ones."""
    usual = {
        "issuer": f"'{ISSUER}'",
        "audience": f"'{AUDIENCE}'",
        "jwks": f"'{jwks}'",
        "operations": "['infer']",
    }
    return "\n".join([f"[issuer.{name}]", *(f"{key} = {value}" for key, value in (usual | more).items()), ""])
