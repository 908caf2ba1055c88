"""Types and limits of HTTP header fields."""

from __future__ import annotations

from collections.abc import Sequence

Fields = Sequence[tuple[str, str]]

MAX_LINE_BYTES = 64 * 1024
"""Limit on a request's path, and on a header field, in bytes."""
MAX_HEAD_BYTES = 128 * 1024
"""Limit in bytes on a request's head, and on what is between two parts of a chunked body's data.

The longest path and the longest field fit together.
"""
FRAMING = frozenset(("connection", "content-length", "date", "keep-alive", "transfer-encoding"))
"""Response header fields that only the transport sets."""
