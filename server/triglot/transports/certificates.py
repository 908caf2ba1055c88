"""The names in a client's certificate, by which access control identifies the client.

They are those of the subjectAltName extension: URIs, DNS names, e-mail addresses and IP addresses, in this
order. The subject's common name is used only if there is none of these, and is prefixed with "CN=": many CAs
verify what is in the extension, but not the common name (RFC 6125, 6.4.4). gRPC's peer identity and Envoy's
principals prefer the extension, too.

Names have to be compared exactly: upper and lower case differ, and "*.example" is the name of a wildcard
certificate, not a pattern. Names of different kinds are never equal: a name without the form of its kind, such
as the DNS names "spiffe://a/b" and "10.0.0.1", is ignored.

Strategy: all transports have the certificate parsed here, because grpc's Python library truncates a name at its
first NUL: "friend\0.stranger.example" would be "friend".
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

Element = tuple[int, bytes]
"""A DER element (X.690): tag and content."""
_SEQUENCE, _EXTENSIONS = 0x30, 0xA3
_ALTERNATIVE_NAME, _COMMON_NAME = b"\x55\x1d\x11", b"\x55\x04\x03"
"""Object identifiers 2.5.29.17 and 2.5.4.3."""
_EC_KEY = bytes.fromhex("2a8648ce3d0201")
"""Object identifier of keys on elliptic curves, whose parameters name the curve (RFC 5480)."""
_KEY_TYPES = {
    bytes.fromhex(identifier): name
    for identifier, name in {
        "2a864886f70d010101": "RSA",
        "2a8648ce3d030107": "P-256",
        "2b81040022": "P-384",
        "2b81040023": "P-521",
        "2b6570": "Ed25519",
        "2b6571": "Ed448",
    }.items()
}
_KINDS = _URI, _DNS, _EMAIL, _ADDRESS = 0x86, 0x82, 0x81, 0x87
_FORMS = {
    _URI: re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+"),
    _DNS: re.compile(rb"[A-Za-z0-9*_-]+(\.[A-Za-z0-9*_-]+)*"),
    _EMAIL: re.compile(rb"(?!CN=)[!-9;-?A-~]+@[A-Za-z0-9.-]+"),  # One "@", and no ":".
}
_CODECS = {0x0C: "utf-8", 0x13: "ascii", 0x14: "latin-1", 0x16: "ascii", 0x1C: "utf-32-be", 0x1E: "utf-16-be"}
"""Codecs of the string types that a common name may have, by tag."""
_MAX_CACHED, _MAX_CACHED_BYTES = 256, 4096


def names_of(transport: asyncio.BaseTransport) -> tuple[str, ...]:
    """Return the names in the certificate of a connection's client.

    None without TLS, or without a certificate.
    """
    secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    certificate = None if secured is None else secured.getpeercert(binary_form=True)
    return () if certificate is None else certificate_names(certificate)


def names_of_context(context: Any) -> tuple[str, ...]:
    """As `names_of`, for the client of a grpc.aio call."""
    for text in context.auth_context().get("x509_pem_cert", ()):
        return certificate_names(ssl.PEM_cert_to_DER_cert(text.decode()))
    return ()


def certificate_names(certificate: bytes) -> tuple[str, ...]:
    """Return the names in a verified certificate in DER; none if it is not well-formed.

    Cached unless it is very long, because grpc.aio's calls need them once per call.
    """
    return (_cached_names if len(certificate) <= _MAX_CACHED_BYTES else _read_names)(certificate)


def key_type(certificate: bytes) -> str:
    """Return the type of the public key in a certificate in DER: "RSA", a curve's name, or else the object
    identifier in hexadecimal digits. Raise `ValueError` if it is not well-formed.
    """
    ((_, sequence),) = _elements(certificate)
    (_, signed), *_ = _elements(sequence)
    # Sequences before it: the signature's algorithm, the issuer, the validity and the subject.
    _, _, _, _, key, *_ = (content for tag, content in _elements(signed) if tag == _SEQUENCE)
    (_, algorithm), *_ = _elements(key)
    (_, identifier), *parameters = _elements(algorithm)
    if identifier == _EC_KEY:
        ((_, identifier),) = parameters
    return _KEY_TYPES.get(identifier, identifier.hex())


def _read_names(certificate: bytes) -> tuple[str, ...]:
    try:
        return tuple(_names(certificate))
    except (ValueError, KeyError):
        return ()


_cached_names = lru_cache(_MAX_CACHED)(_read_names)


def _names(certificate: bytes) -> Iterator[str]:
    ((_, sequence),) = _elements(certificate)
    (_, signed), *_ = _elements(sequence)
    fields = _elements(signed)
    names = [
        name
        for tag, content in fields
        if tag == _EXTENSIONS
        for name in _alternative(content)
        if name[0] in _KINDS
    ]
    for kind in _KINDS:
        for tag, content in names:
            if tag == kind and (text := _text(kind, content)) is not None:
                yield text
    if not names:
        # Sequences before it: the signature's algorithm, the issuer and the validity.
        _, _, _, subject, *_ = (content for tag, content in fields if tag == _SEQUENCE)
        yield from (f"CN={text}" for text in _common(subject)[:1])


def _alternative(extensions: bytes) -> Iterator[Element]:
    ((_, listed),) = _elements(extensions)
    for _, extension in _elements(listed):
        (_, identifier), *_, (_, value) = _elements(extension)
        if identifier == _ALTERNATIVE_NAME:
            ((_, names),) = _elements(value)
            yield from _elements(names)


def _common(subject: bytes) -> list[str]:
    attributes = [_elements(element) for _, several in _elements(subject) for _, element in _elements(several)]
    return [
        content.decode(_CODECS[tag])
        for (_, identifier), (tag, content) in attributes
        if identifier == _COMMON_NAME
    ]


def _text(kind: int, content: bytes) -> str | None:
    """Return a name as text; None if it does not have the form of its kind, or has that of an IP address."""
    if kind == _ADDRESS:
        return str(ipaddress.ip_address(content))
    if not _FORMS[kind].fullmatch(content):
        return None
    text = content.decode()
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text
    return None


def _elements(data: bytes) -> list[Element]:
    """Return consecutive DER elements. Raise `ValueError`."""
    elements: list[Element] = []
    at = 0
    while at < len(data):
        tag, size = data[at : at + 2]
        at += 2
        if size & 0x80:
            length = size & 0x7F
            if not length:
                raise ValueError("expected DER, which says how long things are")
            size = int.from_bytes(data[at : at + length])
            at += length
        if at + size > len(data) or tag & 0x1F == 0x1F:  # Certificates have no tags of several bytes.
            raise ValueError("expected the elements of a certificate")
        elements.append((tag, data[at : at + size]))
        at += size
    return elements
