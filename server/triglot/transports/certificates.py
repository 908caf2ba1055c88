"""The names in a client's certificate."""

from __future__ import annotations

import asyncio
from typing import Any


def names_of(transport: asyncio.BaseTransport) -> tuple[str, ...]:
    """Of the connection's client; none without TLS, or without a certificate."""
    secured = transport.get_extra_info("ssl_object")
    certificate = None if secured is None else secured.getpeercert()
    if not certificate:
        return ()
    return tuple(value for _, value in certificate.get("subjectAltName", ()))


def names_of_context(context: Any) -> tuple[str, ...]:
    """Of the client of one of grpc.aio's calls."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode(errors="replace") for name in names)
