"""Credentials in header fields or gRPC metadata, in the forms that unmodified clients can send."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass

from triglot.core.errors import Unauthenticated
from triglot.core.operation import Fields

AUTHORIZATION, API_KEY = "authorization", "x-api-key"
CREDENTIAL_FIELDS = frozenset((AUTHORIZATION, API_KEY))
MAX_TOKEN = 16 * 1024
"""Longest token in characters; those of large organisations have a few thousand."""
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Token:
    """A secret, with the client's name if one was sent."""

    text: str
    user: str = ""


def token_of(fields: Fields) -> Token | None:
    """Return the token in header fields, None without one.

    Raise `Unauthenticated` for more than one, or an invalid one. No error text contains any part of the secret.
    """
    found = [field for field in fields if field[0] in CREDENTIAL_FIELDS]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(sorted({name for name, _ in found}))
        raise Unauthenticated(f"{names}: expected one credential, got {len(found)}")
    name, value = found[0]
    if len(value) > MAX_TOKEN:
        raise Unauthenticated(f"{name}: expected at most {MAX_TOKEN} characters, got {len(value)}")
    if name == API_KEY:
        return Token(value)
    scheme, _, rest = value.partition(" ")
    kind = scheme.lower()
    if kind == "bearer":
        return Token(rest.strip())
    if kind == "basic":
        return _basic_token(rest.strip())
    raise Unauthenticated(f"{name}: expected Bearer or Basic")


def _basic_token(encoded: str) -> Token:
    """Return the token of Basic credentials (RFC 7617): tritonclient's plugin sends name and token."""
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise Unauthenticated(f"{AUTHORIZATION}: Basic expects NAME:TOKEN in base64") from None
    if not colon or not user:
        raise Unauthenticated(f"{AUTHORIZATION}: Basic expects NAME:TOKEN in base64")
    return Token(password, user)


def digest(token: str) -> bytes:
    """Return the token's hash, which the access file has in place of the token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(TOKEN_BYTES)
