"""Types, limits and rules of HTTP header fields."""

from __future__ import annotations

from collections.abc import Sequence

Fields = Sequence[tuple[str, str]]

MAX_LINE_BYTES = 64 * 1024
"""Limit on a request's path, and on a header field, in bytes."""
MAX_FIELDS = 128
MAX_HEAD_BYTES = 128 * 1024
"""Limit in bytes on a request's head, and on what is between two parts of a chunked body's data.

The longest path and the longest field fit together.
"""
BAD_REQUEST, TARGET_TOO_LONG, HEAD_TOO_LARGE = 400, 414, 431
LONG_TARGET = f"the target is longer than {MAX_LINE_BYTES} bytes"
LONG_FIELD = f"a header field is longer than {MAX_LINE_BYTES} bytes"
MANY_FIELDS = f"there are more than {MAX_FIELDS} header fields"
LARGE_HEAD = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
MAX_QUOTED = 200
"""Longest quotation of a field in an error text, in characters."""
FRAMING = frozenset(("connection", "content-length", "date", "keep-alive", "transfer-encoding"))
"""Response header fields that only the transport sets."""
SINGLE = frozenset(
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
SAME = frozenset(("inference-header-content-length",))
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
