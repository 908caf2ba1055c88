"""An answer of HTTP/1.1, as our own REST server writes it, cut into its head and its body (RFC 9112)."""

from __future__ import annotations

from dataclasses import dataclass

_OF_THE_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
UNTIL_CLOSED = -1


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The status and the fields, without those that are about the connection; `ended`: there is no body."""

    status: int
    fields: list[tuple[bytes, bytes]]
    ended: bool


class AnswerReader:
    """Bytes in, the head and pieces of the body out. `bodiless`: the request was HEAD."""

    def __init__(self, *, bodiless: bool) -> None:
        self.over = False
        """Whether the whole answer has come."""
        self.begun = False
        """Whether its head has come."""
        self._bodiless = bodiless
        self._line = b""
        """What has come of a head, or of the line before or after a chunk."""
        self._chunked = False
        self._left = 0

    def feed(self, data: bytes | memoryview) -> list[AnswerHead | memoryview]:
        """What comes with these bytes. Raises `ValueError` for what is no answer."""
        found: list[AnswerHead | memoryview] = []
        view = memoryview(data).cast("B")
        while view and not self.over:
            if not self.begun:
                view = self._read_head(view, found)
            elif self._left == UNTIL_CLOSED:
                found.append(view)
                view = view[:0]
            elif self._left:
                found.append(view[: self._left])
                taken = min(len(view), self._left)
                self._left -= taken
                view = view[taken:]
                self.over = not self._left and not self._chunked
            else:
                view = self._read_size(view)
        return found

    def closed(self) -> bool:
        """No more bytes come; whether the answer ends so."""
        if self.begun and self._left == UNTIL_CLOSED:
            self.over = True
        return self.over

    def _read_head(self, view: memoryview, found: list[AnswerHead | memoryview]) -> memoryview:
        before = len(self._line)
        self._line += bytes(view)
        end = self._line.find(b"\r\n\r\n")
        if end < 0:
            return view[:0]
        lines, self._line = self._line[:end].split(b"\r\n"), b""
        found.append(self._head(lines))
        return view[end + 4 - before :]

    def _head(self, lines: list[bytes]) -> AnswerHead:
        status = int(lines[0].split(b" ", 2)[1])
        fields: list[tuple[bytes, bytes]] = []
        length: int | None = None
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name, value = name.strip().lower(), value.strip()
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                self._chunked = value.lower() == b"chunked"
            if name not in _OF_THE_CONNECTION:
                fields.append((name, value))
        if status < 200:
            return AnswerHead(status, fields, ended=False)  # Another one follows.
        self.begun = True
        self.over = self._bodiless or status in (204, 304) or (length == 0 and not self._chunked)
        self._left = 0 if self._chunked else UNTIL_CLOSED if length is None else length
        return AnswerHead(status, fields, ended=self.over)

    def _read_size(self, view: memoryview) -> memoryview:
        """The line before a chunk, which the end of the one before may precede."""
        before = len(self._line)
        self._line += bytes(view[:64])
        start = 2 if self._line.startswith(b"\r\n") else 0
        end = self._line.find(b"\r\n", start)
        if end < 0:
            if len(self._line) > 64:
                raise ValueError("a chunk's size is no number")
            return view[64:] if len(view) > 64 else view[:0]
        size = int(self._line[start:end].partition(b";")[0], 16)
        self._line = b""
        self._left = size
        self.over = not size
        return view[end + 2 - before :]
