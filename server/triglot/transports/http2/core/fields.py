"""Header fields: names and values are classified once, by the rules of HTTP/2 and gRPC.

The rules are those of RFC 9113, 8, and of gRPC over HTTP/2, Requests.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from triglot.core.compiling import mypyc_attr

METHOD: Final = 0
SCHEME: Final = 1
PATH: Final = 2
AUTHORITY: Final = 3
TE: Final = 4
CONTENT_TYPE: Final = 5
TIMEOUT: Final = 6
ENCODING: Final = 7
ACCEPT_ENCODING: Final = 8
CONTENT_LENGTH: Final = 9
METADATA: Final = 10
TRACEPARENT: Final = 11
TRACESTATE: Final = 12
CREDENTIAL: Final = 13
MALFORMED: Final = 14
OMITTED: Final = 15
"""Kinds of other valid fields, of the trace context, of what access control asks for, of invalid fields, and of
one that stands for many (`omitted`)."""
FIRST_REGULAR: Final = TE
"""Kinds below this are pseudo-headers."""
_TEXTS: Final = frozenset((PATH, ENCODING, ACCEPT_ENCODING, TRACEPARENT, TRACESTATE, CREDENTIAL))
_RESTRICTED: Final = b"triton-grpc-protocol-"
"""Begins the names of the fields that Triton's restricted groups ask for (`access.restricted`)."""
FIELD_BYTES: Final = 32
"""Bytes that HTTP/2 counts per field besides its name and value (RFC 9113, 6.5.2)."""
_KINDS: Final = {
    b":method": METHOD,
    b":scheme": SCHEME,
    b":path": PATH,
    b":authority": AUTHORITY,
    b"te": TE,
    b"content-type": CONTENT_TYPE,
    b"grpc-timeout": TIMEOUT,
    b"grpc-encoding": ENCODING,
    b"grpc-accept-encoding": ACCEPT_ENCODING,
    b"content-length": CONTENT_LENGTH,
    b"traceparent": TRACEPARENT,
    b"tracestate": TRACESTATE,
    b"authorization": CREDENTIAL,
    b"x-api-key": CREDENTIAL,
    **dict.fromkeys(
        (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"), MALFORMED
    ),
}
_SECONDS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
MAX_TIMEOUT: Final = 1_000_000_000
"""Largest number of a timeout, whatever its unit; the specification of gRPC allows eight digits."""
MAX_TIMEOUT_DIGITS: Final = 11
MAX_QUOTED: Final = 100
"""Longest quotation of a value in an error text, in bytes."""
_NAME: Final = re.compile(rb"[0-9a-z_.\-!#$%&'*+^`|~]+")
_VALUE: Final = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")
"""Matched as a whole: searching for invalid characters takes ten times as long."""
_METADATA_VALUE: Final = re.compile(rb"(?!\t)[^\x00\r\n]*(?<!\t)")
"""gRPC clients send values with spaces around them, and gRPC servers accept these unchanged."""
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_GRPC_TYPE: Final = re.compile(rb"application/grpc([+;].*)?")


class Name:
    """A field name, classified."""

    __slots__ = ("is_binary", "is_parsed", "is_valid", "kind", "size", "text", "value")

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.text = value.decode("latin-1")
        kind = _KINDS.get(value)
        if kind is None:
            is_secret = value.startswith(_RESTRICTED) and not value.endswith(b"-bin")
            kind = MALFORMED if not _NAME.fullmatch(value) else CREDENTIAL if is_secret else METADATA
        self.kind = kind
        self.is_binary = kind == METADATA and value.endswith(b"-bin")
        self.is_parsed = kind != METADATA or self.is_binary
        """Whether its values have a meaning besides their bytes."""
        self.is_valid = (_METADATA_VALUE if kind >= METADATA or kind == TIMEOUT else _VALUE).fullmatch
        """Matches its valid values."""
        self.size = FIELD_BYTES + len(value)


_cached_name = lru_cache(maxsize=1024)(Name)
MAX_CACHED_NAME: Final = 64


def name_of(value: bytes) -> Name:
    """Return the classified name; short names are cached."""
    return _cached_name(value) if len(value) <= MAX_CACHED_NAME else Name(value)


class Field:
    """A field of a header block.

    `kind`: one of the constants above. `meaning`: the parsed value: text of a path or coding, seconds of a
    timeout, bytes of a length; whether a method is POST, and a content type gRPC's; of other fields the raw
    value. `problem`: what is wrong with a timeout or with binary metadata, else "". `size`: bytes as HTTP/2
    counts them.
    """

    __slots__ = ("_text", "kind", "meaning", "name", "problem", "size", "value")

    def __init__(self, name: Name, value: bytes) -> None:
        self.name = name
        self.value = value
        self._text: str | None = None
        self.size = name.size + len(value)
        self.kind = name.kind if name.is_valid(value) else MALFORMED
        self.meaning: Any = value
        self.problem = ""
        if name.is_parsed:
            self._read()

    @property
    def text(self) -> str:
        """The value as text."""
        if self._text is None:
            self._text = self.value.decode("latin-1")
        return self._text

    def _read(self) -> None:
        kind, value = self.kind, self.value
        if kind == TIMEOUT:
            self._read_timeout()
        elif kind in _TEXTS:
            self.meaning = self.text
        elif kind == METHOD:
            self.meaning = value == b"POST"
        elif kind == CONTENT_TYPE:
            self.meaning = _GRPC_TYPE.fullmatch(value) is not None
        elif kind == METADATA:
            self._check_binary()
        elif kind == CONTENT_LENGTH:
            if _LENGTH.fullmatch(value):
                self.meaning = int(value)
            else:
                self.kind = MALFORMED
        elif kind == TE and value != b"trailers":
            self.kind = MALFORMED

    def _read_timeout(self) -> None:
        """Read a timeout as gRPC's C core does (timeout_encoding.cc): one that is too large is no deadline."""
        value = self.value.strip(b" ")
        digits, unit = value[:-1].rstrip(b" "), value[-1:]
        self.meaning = None
        if not digits.isdigit() or unit not in _SECONDS:
            self.problem = f"grpc-timeout: expected digits and one of HMSmun, got {value[:MAX_QUOTED]!r}"
        elif (number := int(digits.lstrip(b"0")[:MAX_TIMEOUT_DIGITS] or b"0")) <= MAX_TIMEOUT:
            self.meaning = number * _SECONDS[unit]

    def _check_binary(self) -> None:
        try:
            self._binary_values()
        except binascii.Error:
            self.problem = f"{self.name.text}: expected base64"

    def _binary_values(self) -> list[bytes]:
        # Not kept: of many short values, the objects are much larger than the field.
        # One field may hold several values, and padding may be omitted.
        parts = [part + b"=" * (-len(part) % 4) for part in self.value.split(b",")]
        return [base64.b64decode(part, validate=True) for part in parts]

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the field as gRPC metadata."""
        if self.name.is_binary:
            return [(self.name.text, value) for value in self._binary_values()]
        return ((self.name.text, self.text),)


_cached_field = lru_cache(maxsize=256)(Field)
MAX_CACHED_VALUE: Final = 2048


def field_of(name: Name, value: bytes) -> Field:
    """Return a field that clients send again: a credential, or one for the table. Repeated ones are cached."""
    return _cached_field(name, value) if len(value) <= MAX_CACHED_VALUE else Field(name, value)


def omitted(count: int, size: int) -> Field:
    """Return a field that stands for `count` fields of `size` bytes, which were too many to keep."""
    field = Field(name_of(b"omitted"), b"")
    field.kind, field.meaning, field.size = OMITTED, count, size
    return field


@mypyc_attr(native_class=False)
class MalformedRequest(Exception):
    """The fields are not a valid request: the stream ends with PROTOCOL_ERROR, others continue."""
