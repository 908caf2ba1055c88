"""The server's TLS configuration; certificate files are read again when they change."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triglot.config.options import Config, ConfigError

log = logging.getLogger(__name__)

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2 that HTTP/2 allows (RFC 9113, 9.2.2); TLS 1.3 has no others."""
Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of the files; `client_ca` is empty if clients need no certificate."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class Tls:
    """The TLS context of new connections; offers `protocols` by ALPN.

    Raises `ConfigError` for missing files, and for files that are not a certificate and its key.
    """

    def __init__(self, config: Config, *protocols: str) -> None:
        self._certificate = Path(config.tls_certificate)
        self._key = Path(config.tls_key)
        self._client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
        self._certificates_asked = ssl.CERT_OPTIONAL if config.client_auth == "optional" else ssl.CERT_REQUIRED
        self._protocols = protocols
        self._stamp = self._read_stamp()
        self._pem, self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Returns the context for a new connection."""
        self.renew()
        return self._context

    def pem(self) -> Pem:
        """Returns the files' content, for libraries that read certificates themselves."""
        self.renew()
        return self._pem

    def renew(self) -> bool:
        """Read the files if they have changed; returns whether a new certificate is in use. Errors are logged."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._pem, self._context = self._load()
        except ConfigError as error:
            log.warning("the certificate files changed, but the previous certificate stays in use: %s", error)
            return False
        log.info("the certificate files changed: new connections use the new certificate")
        return True

    def _files(self) -> Sequence[Path]:
        return [self._certificate, self._key, *([self._client_ca] if self._client_ca else [])]

    def _read_stamp(self) -> Stamp:
        return tuple(map(_stamp, self._files()))

    def _load(self) -> tuple[Pem, ssl.SSLContext]:
        pem = Pem(
            _read("tls_certificate", self._certificate, b"-BEGIN CERTIFICATE-", "certificate"),
            _read("tls_key", self._key, b"PRIVATE KEY-", "private key"),
            _read("tls_client_ca", self._client_ca, b"-BEGIN CERTIFICATE-", "certificate")
            if self._client_ca
            else b"",
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols(list(self._protocols))
        try:
            context.load_cert_chain(self._certificate, self._key, self._refuse_passphrase)
        except ssl.SSLError as error:
            raise ConfigError(self._misfit(error)) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise ConfigError(f"tls_client_ca: {self._client_ca} is damaged: {error.reason}") from None
            context.verify_mode = self._certificates_asked
            # No session tickets: a resumed session would not check whether the client's certificate has expired
            # since.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return pem, context

    def _refuse_passphrase(self) -> str:
        raise ConfigError(f"tls_key: {self._key} has a passphrase, expected a key without one")

    def _misfit(self, error: ssl.SSLError) -> str:
        if "MISMATCH" in (error.reason or ""):
            return f"tls_key: {self._key} is not the key of tls_certificate {self._certificate}"
        return f"tls_certificate {self._certificate}, tls_key {self._key}: one of them is damaged: {error}"


def check_certificate(config: Config) -> None:
    """Raises `ConfigError` if a certificate is configured that cannot be used."""
    if config.tls_certificate:
        Tls(config)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(option: str, file: Path, marker: bytes, thing: str) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {file}: {error.strerror}") from None
    if marker not in text:
        raise ConfigError(f"{option}: expected a {thing} in PEM, but {file} has none")
    return text
