"""Parses large JSON texts in pieces, so that the GIL is never held for long, and the limit on values holds.

Strategy: a scanner finds the commas, brackets and braces outside of strings, a chunk of the text at a time, and
counts values. The text is split at commas, at any depth. A piece becomes a JSON text of its own: the containers
that are open before it are opened in front of it, and those open after it are closed. So an ordinary parser reads
it, and rejects invalid JSON. Its values are then moved into the containers that earlier pieces have left open.
Markers at the splits prove that a piece begins and ends between two values.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array
from triglot.protocols.json.dialect import (
    CONTAINER_COST,
    HUGE_INTEGER,
    MAX_DEPTH,
    STANDARD,
    VALUE_COST,
    Dialect,
    JsonLimits,
)

CHUNK = 64 * 1024
"""Bytes that are scanned, and parsed, at once: some 5 ms, if they are lists."""
MAX_WITHOUT_COMMA = 1024 * 1024
"""Most bytes outside of strings between two commas; more are a number, or blanks, that no client sends."""
_BRACKET, _BRACE = b"[{"
_STRUCTURE = np.zeros(256, np.bool_)
_STRUCTURE[list(b",:[]{}")] = True
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
_COST = np.zeros(256, np.int64)
_COST[list(b",:")], _COST[list(b"[{")] = VALUE_COST, CONTAINER_COST
# Random, so that no client's text can contain them.
_FIRST, _LAST = (f"{name}-{secrets.token_hex(8)}" for name in ("first", "last"))
_OPENING = {_BRACKET: b"[", _BRACE: b'{"%b":' % _FIRST.encode()}
_FIRST_ITEM = {_BRACKET: b'["%b",' % _FIRST.encode(), _BRACE: b'{"%b":0,' % _FIRST.encode()}
_LAST_ITEM = {_BRACKET: b',"%b"]' % _LAST.encode(), _BRACE: b',"%b":0}' % _LAST.encode()}
_CLOSING = {_BRACKET: b"]", _BRACE: b"}"}


class Scanner:
    """Scans a text once.

    `cost` is that of the values so far in the budget. `openers` are the brackets and braces open at the last comma
    that `commas` yielded. `end` is the offset of the end of the outermost container, or else of the text.
    """

    def __init__(
        self, text: bytes, limits: JsonLimits, dialect: Dialect = STANDARD, *, chunk: int = CHUNK
    ) -> None:
        self.cost = 0
        self.openers = b""
        self.end = len(text)
        self._text = text
        self._limits = limits
        self._dialect = dialect
        self._size = chunk
        self._in_string = False

    def commas(self) -> Iterator[int]:
        """Yield offsets where the text can be split: the last comma of each chunk that has one.

        Raise `InvalidArgument` for a text nested too deep, or long without a comma, and `PayloadTooLarge`.
        """
        at = without_comma = in_string = 0
        opened = b""
        while at < self.end:
            chunk = self._chunk(at)
            positions, kinds = self._structure(chunk)
            depths = len(opened) + np.cumsum(_STEP[kinds], dtype=np.int64)
            self.cost += int(_COST[kinds].sum())
            self._limits.check_cost(self.cost)
            if depths.size and int(depths.max()) > MAX_DEPTH:
                raise self._dialect.too_deep()
            closed = np.flatnonzero((depths <= 0) & (_STEP[kinds] < 0))
            if closed.size:
                self.end = at + int(positions[closed[0]]) + 1
                return
            commas = np.flatnonzero((kinds == ord(",")) & (depths > 0))
            rest = 0
            if commas.size:
                rest = int(commas[-1]) + 1
                opened = self.openers = _open_after(opened, kinds[:rest], depths[:rest])
                without_comma = in_string = 0
                yield at + int(positions[rest - 1])
            elif self._in_string:
                in_string += len(chunk)
                self._limits.check_text(in_string)
            else:
                without_comma += len(chunk)
                if without_comma > MAX_WITHOUT_COMMA:
                    raise InvalidArgument(
                        f"{self._dialect.error}: {MAX_WITHOUT_COMMA} bytes without a comma before byte {at}"
                    )
            opened = _open_after(opened, kinds[rest:], depths[rest:])
            at += len(chunk)

    def _chunk(self, at: int) -> bytes:
        """Return the next bytes, without splitting an escape."""
        chunk = self._text[at : at + self._size]
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        return self._text[at : at + self._size + 1] if backslashes % 2 else chunk

    def _structure(self, chunk: bytes) -> tuple[Array, Array]:
        """Return offsets and codes of the structural characters outside of strings."""
        if b"\\" in chunk:
            # Only the last backslash of a row is unpaired.
            chunk = chunk.replace(rb"\\", b"__").replace(rb"\"", b"__")
        has_quotes = b'"' in chunk
        if self._in_string and not has_quotes:
            return np.empty(0, np.intp), np.empty(0, np.uint8)
        codes = np.frombuffer(chunk, np.uint8)
        found = _STRUCTURE[codes]
        if has_quotes:
            inside = np.bitwise_xor.accumulate(codes == ord('"')) ^ self._in_string
            self._in_string = bool(inside[-1])
            found &= ~inside
        positions = np.flatnonzero(found)
        return positions, codes[positions]


def _open_after(opened: bytes, kinds: Array, depths: Array) -> bytes:
    """Return the brackets and braces that are open after `kinds`; `depths` are the depths after each of them."""
    if not depths.size:
        return opened
    lowest_from = np.minimum.accumulate(depths[::-1])[::-1]
    stays = (_STEP[kinds] > 0) & (depths == lowest_from)
    still_open: bytes = kinds[stays].tobytes()
    return opened[: int(lowest_from[0])] + still_open


def parse_in_pieces(text: bytes, limits: JsonLimits, dialect: Dialect = STANDARD, *, chunk: int = CHUNK) -> Any:
    """Return the values of a text, of which `chunk` bytes are parsed at once.

    Raise `InvalidArgument`, and `PayloadTooLarge` before too many values are created.
    """
    scanner = Scanner(text, limits, dialect, chunk=chunk)
    tree = _Tree(dialect)
    start, openers = 0, b""
    for comma in scanner.commas():
        tree.add(text[start:comma], openers, scanner.openers, start)
        start, openers = comma + 1, scanner.openers
    tree.add(text[start : scanner.end], openers, b"", start)
    if not dialect.ignores_rest and text[scanner.end :].strip(b" \t\r\n"):
        raise InvalidArgument(f"{dialect.error}: Extra data: byte {scanner.end}")
    return tree.root


class _Tree:
    """Merges the values of pieces; `_open` are the containers that are still open, outermost first."""

    def __init__(self, dialect: Dialect) -> None:
        self.root: Any = None
        self._dialect = dialect
        self._open: list[Any] = []

    def add(self, piece: bytes, before: bytes, after: bytes, at: int) -> None:
        """Add a piece at offset `at`; `before` and `after` are the openers at its two ends."""
        where = f"in the part that starts at byte {at}"
        root = self._parse(_completed(piece, before, after), where)
        begins = _continued(root, len(before))
        try:
            ends = _unfinished(root, len(after))
        except (LookupError, TypeError, StopIteration):
            raise InvalidArgument(f"{self._dialect.error}: duplicate key in an object, {where}") from None
        for opened, more in zip(reversed(self._open), reversed(begins), strict=True):
            if isinstance(more, list):
                del more[0]
                opened.extend(more)
            else:
                del more[_FIRST]
                for key, value in more.items():
                    if key not in opened or not self._dialect.keeps_first:
                        opened[key] = value
        if not self._open:
            self.root = root
        self._open = [
            self._open[level] if level < len(begins) and end is begins[level] else end
            for level, end in enumerate(ends)
        ]

    def _parse(self, text: bytes, where: str) -> Any:
        dialect = self._dialect
        try:
            if len(text) > MAX_WITHOUT_COMMA or not HUGE_INTEGER.search(text):
                return dialect.loads(text)
        except ValueError as error:
            if len(text) > MAX_WITHOUT_COMMA:  # A long string, for which other parsers are slow.
                raise InvalidArgument(f"{dialect.error}: {error}, {where}") from None
        try:
            return dialect.parse(text)
        except RecursionError:
            raise dialect.too_deep() from None
        except ValueError as error:
            # Its offset would be that in the piece.
            raise InvalidArgument(f"{dialect.error}: {getattr(error, 'msg', error)}, {where}") from None


def _completed(piece: bytes, before: bytes, after: bytes) -> bytes:
    """Return the piece as a complete JSON text, with markers for what is in other pieces."""
    parts = [_OPENING[kind] for kind in before[:-1]]
    parts += [_FIRST_ITEM[kind] for kind in before[-1:]]
    parts.append(piece)
    parts += [_LAST_ITEM[kind] for kind in after[-1:]]
    parts += [_CLOSING[kind] for kind in reversed(after[:-1])]
    return b"".join(parts)


def _continued(root: Any, count: int) -> list[Any]:
    """Return a piece's containers that continue those of earlier pieces."""
    containers = []
    for _ in range(count):
        containers.append(root)
        root = root[0] if isinstance(root, list) else root[_FIRST]
    return containers


def _unfinished(root: Any, count: int) -> list[Any]:
    """Return a piece's containers that continue in later ones, and remove the last marker.

    Raise `LookupError`, `TypeError` or `StopIteration` if a repeated key hides which they are.
    """
    containers = []
    last: Any = _LAST
    for _ in range(count):
        containers.append(root)
        last = next(reversed(root)) if isinstance(root, dict) else -1
        root = root[last]
    if count:
        innermost = containers[-1]
        if (innermost[-1] if isinstance(innermost, list) else last) != _LAST:
            raise LookupError("another container")
        del innermost[-1 if isinstance(innermost, list) else _LAST]
    return containers
