"""The server's TLS configuration; certificate files are read again when they change."""

from __future__ import annotations

import codecs
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triglot.config.options import NO_PORT, Config, ConfigError
from triglot.transports.certificates import key_type

log = logging.getLogger(__name__)

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2 that HTTP/2 allows (RFC 9113, 9.2.2); TLS 1.3 has no others."""
GRPC_KEYS = ("RSA", "P-256", "P-384")
"""Types of keys that gRPC's clients accept (grpcio 1.85.1: the signatures that BoringSSL offers by default)."""
Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of the files; `client_ca` is empty if clients need no certificate."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class Tls:
    """The TLS context of new connections; offers `protocols` by ALPN.

    Raise `ConfigError` for missing files, and for files that are not a certificate and its key.
    """

    def __init__(self, config: Config, *protocols: str) -> None:
        self._certificate = Path(config.tls_certificate)
        self._key = Path(config.tls_key)
        self._client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
        self._certificates_asked = ssl.CERT_OPTIONAL if config.client_auth == "optional" else ssl.CERT_REQUIRED
        self._protocols = protocols
        self._for_grpc = config.grpc_port != NO_PORT
        self._stamp = self._read_stamp()
        self._pem, self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        self.renew()
        return self._context

    def pem(self) -> Pem:
        """Return the files' content, for libraries that read certificates themselves."""
        self.renew()
        return self._pem

    def refused_by_grpc(self) -> str:
        """Return why gRPC's clients refuse the certificate; "" if they accept it, or if there is no gRPC port."""
        if not self._for_grpc:
            return ""
        # A chain begins with the server's own certificate.
        text, end, _ = self._pem.certificate.partition(b"-----END CERTIFICATE-----")
        _, begin, text = text.rpartition(b"-----BEGIN CERTIFICATE-----")
        try:
            found = key_type(ssl.PEM_cert_to_DER_cert((begin + text + end).decode("ascii")))
        except ValueError:
            return ""  # OpenSSL could read it.
        if found in GRPC_KEYS:
            return ""
        return (
            f"tls_certificate: {self._certificate} has a key of type {found}, which gRPC's clients refuse; "
            f"they accept {', '.join(GRPC_KEYS)}"
        )

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
        if refused := self.refused_by_grpc():
            log.warning("%s", refused)
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
            with _as_file(pem.certificate) as certificate, _as_file(pem.key) as key:
                context.load_cert_chain(certificate, key, self._refuse_passphrase)
        except ssl.SSLError as error:
            raise ConfigError(self._misfit(error)) from None
        if self._client_ca is not None:
            try:
                with _as_file(pem.client_ca) as client_ca:
                    context.load_verify_locations(client_ca)
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
    """Warn if gRPC's clients refuse the configured certificate. Raise `ConfigError` if it cannot be used."""
    if config.tls_certificate and (refused := Tls(config).refused_by_grpc()):
        log.warning("%s", refused)


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
    # Editors on Windows write a byte order mark, before which OpenSSL and BoringSSL find no first line.
    return text.removeprefix(codecs.BOM_UTF8)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file in memory, because `ssl` reads certificates and keys from files only."""
    descriptor = os.memfd_create("pem")
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{descriptor}"
