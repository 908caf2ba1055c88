"""Types, limits and rules of HTTP header fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Fields = Sequence[tuple[str, str]]

MAX_LINE_BYTES: Final = 64 * 1024
"""Limit on a request's path, and on a header field, in bytes."""
MAX_FIELDS: Final = 128
MAX_HEAD_BYTES: Final = 128 * 1024
"""Limit in bytes on a request's head, and on what is between two parts of a chunked body's data.

The longest path and the longest field fit together.
"""
BAD_REQUEST: Final = 400
TARGET_TOO_LONG: Final = 414
HEAD_TOO_LARGE: Final = 431
LONG_TARGET: Final = f"the target is longer than {MAX_LINE_BYTES} bytes"
LONG_FIELD: Final = f"a header field is longer than {MAX_LINE_BYTES} bytes"
MANY_FIELDS: Final = f"there are more than {MAX_FIELDS} header fields"
LARGE_HEAD: Final = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
MAX_QUOTED: Final = 200
"""Longest quotation of a field in an error text, in characters."""
FRAMING: Final = frozenset(("connection", "content-length", "date", "keep-alive", "transfer-encoding"))
"""Response header fields that only the transport sets."""
SINGLE: Final = frozenset(
    (
        "content-length",
        "content-location",
        "content-range",
        "content-type",
        "etag",
        "host",
        "max-forwards",
        "server",
        "transfer-encoding",
        "user-agent",
    )
)
"""Fields whose repetition different servers could interpret differently."""
SAME: Final = frozenset(("inference-header-content-length",))
"""The same, but a repetition of an equal value can only mean that."""


def repetition(fields: Fields) -> str:
    """Return what is wrong with fields of which one is repeated that must not be; "" if there is none."""
    seen: dict[str, str] = {}
    for name, value in fields:
        if (before := seen.get(name)) is not None:
            if name in SINGLE:
                return f"Duplicate '{name}' header found."
            if name in SAME and before != value:
                values = f"{before[:MAX_QUOTED]!r} and {value[:MAX_QUOTED]!r}"
                return f"duplicate header '{name}' with different values, {values}"
        seen[name] = value
    return ""
