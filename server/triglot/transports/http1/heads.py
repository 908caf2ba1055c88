"""Cache of parsed heads of requests by layout: a head's lines without the values that differ between requests.

Strategy: a client's requests to a target differ in few fields: Content-Length, ids, trace context. A head whose
other lines are those of a head that was parsed differs from what was parsed in the same values only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

BLANK_LINE: Final = b"\r\n\r\n"
MAX_LAYOUT_BYTES: Final = 2048
"""Longest head that is cached, in bytes."""
MAX_LAYOUTS: Final = 64
MAX_DIGITS: Final = 18
"""Digits of a Content-Length that certainly fits 64 bits."""
LENGTH: Final = "content-length"
_CONSTANT: Final = frozenset(("connection", "proxy-connection", "transfer-encoding", "upgrade"))
"""Fields whose values change how the head itself is parsed."""
_PLAIN: Final = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
"""Values that are what is sent, without blanks around them."""


@dataclass(slots=True)
class RequestHead:
    """A request without its body. `length`: that of the body; None: it is chunked. `fields`: lower-case names."""

    verb: str
    target: str
    fields: list[tuple[str, str]]
    length: int | None
    is_http10: bool
    keep_alive: bool


class _Layout:
    """The lines of a head, and for each the beginning that a line with another value has; b"" if none may."""

    __slots__ = ("begins", "head", "lines")

    def __init__(self, lines: list[bytes], begins: list[bytes], head: RequestHead) -> None:
        self.lines = lines
        self.begins = begins
        self.head = head


class HeadLayouts:
    """The layouts of a server's requests, first in, first out: one for each first line and number of lines."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], _Layout] = {}

    def read(self, text: bytes) -> RequestHead | None:
        """Return the head that a text is, by a known layout; None if there is none."""
        if len(text) > MAX_LAYOUT_BYTES or not text.endswith(BLANK_LINE):
            return None
        lines = text[:-4].split(b"\r\n")
        layout = self._known.get((lines[0], len(lines)))
        if layout is None:
            return None
        head = layout.head
        length = head.length
        fields = head.fields.copy()
        known = layout.lines
        for at, line in enumerate(lines):
            if line == known[at]:
                continue
            begin = layout.begins[at]
            if not begin or not line.startswith(begin):
                return None
            value = line[len(begin) :]
            if _PLAIN.fullmatch(value) is None:
                return None
            name, text_value = fields[at - 1][0], value.decode()
            if name == LENGTH:
                if len(value) > MAX_DIGITS or not value.isdigit():
                    return None
                length = int(value)
            fields[at - 1] = name, text_value
        return RequestHead(head.verb, head.target, fields, length, head.is_http10, head.keep_alive)

    def learn(self, text: bytes, head: RequestHead) -> None:
        """Cache the layout of a head's whole text, if each of its lines is a field as it was read."""
        if len(text) > MAX_LAYOUT_BYTES or len(dict(head.fields)) < len(head.fields):
            return
        lines = text[:-4].split(b"\r\n")
        first = f"{head.verb} {head.target} HTTP/1.{0 if head.is_http10 else 1}"
        if lines[0] != first.encode("latin-1") or len(lines) != len(head.fields) + 1:
            return
        begins = [b""]
        for line, (name, value) in zip(lines[1:], head.fields, strict=True):
            begin, colon, rest = line.partition(b": ")
            as_sent = rest.decode("utf-8", "surrogateescape")
            if not colon or begin.decode("latin-1").lower() != name or as_sent != value:
                return
            begins.append(b"" if name in _CONSTANT else begin + colon)
        key = lines[0], len(lines)
        if len(self._known) >= MAX_LAYOUTS and key not in self._known:
            del self._known[next(iter(self._known))]
        self._known[key] = _Layout(lines, begins, head)
