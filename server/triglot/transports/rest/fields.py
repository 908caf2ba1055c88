"""Header fields of requests and answers, and how large heads may be."""

from __future__ import annotations

from collections.abc import Sequence

Fields = Sequence[tuple[str, str]]

LONGEST_LINE = 64 * 1024
"""Bytes of a request's path, and of a header field."""
MOST_HEAD_BYTES = 128 * 1024
"""Of one request's head, or of what a chunked body has between two parts of its data: the longest path and the
longest field fit."""
FRAMING = frozenset(("connection", "content-length", "date", "keep-alive", "transfer-encoding"))
"""Fields of an answer that only what carries it makes."""
