"""JSON values as TensorFlow Serving's parser has them, and their form in error texts (tfs 4.3)."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from triglot.core.errors import InvalidArgument
from triglot.protocols.tfserving.json_numbers import shortest_text

QUOTED_BYTES = 256
"""An error text quotes a value up to the token that reaches this number of bytes."""
_CONTROL = re.compile(rb'["\\\x00-\x1f]')
_ESCAPES = {bytes([code]): b"\\u%04X" % code for code in range(0x20)} | {
    b'"': b'\\"',
    b"\\": b"\\\\",
    b"\b": b"\\b",
    b"\f": b"\\f",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\t": b"\\t",
}
_BASE64_SPACE = b" \t\n\v\f\r"
_BASE64_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_END = object()


@dataclass(slots=True)
class Object:
    """A JSON object with its members in order; keys may repeat."""

    members: list[tuple[bytes, Value]]

    def first(self) -> dict[bytes, Value]:
        """Returns the members by key; the first of equal keys counts."""
        return dict(reversed(self.members))


Value = None | bool | int | float | bytes | list[Any] | Object
"""A JSON value. Integers beyond 64 bits are floats. A string is its bytes, which need not be UTF-8."""


def json_type(value: Value) -> str:
    """Returns the type of a value as error texts name it."""
    if value is None:
        return "Null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return "Number"
    if isinstance(value, bytes):
        return "String"
    return "Object" if isinstance(value, Object) else "Array"


def quote(text: bytes) -> bytes:
    """Returns a JSON string; bytes from 0x7f on are kept as they are, UTF-8 or not."""
    return b'"' + _CONTROL.sub(lambda match: _ESCAPES[match[0]], text) + b'"'


def text_of(text: bytes) -> str:
    """Returns a name or string for an error text; bytes that are not UTF-8 become U+FFFD."""
    return text.decode(errors="replace")


def debug_text(value: Value) -> str:
    """Returns a value as error texts quote it: indented by four, arrays on one line, cut after `QUOTED_BYTES`.

    The text ends before the first NaN or infinity.
    """
    pieces: list[bytes] = []
    size = 0
    for token in _tokens(value):
        pieces.append(token)
        size += len(token)
        if size >= QUOTED_BYTES:
            break
    return text_of(b"".join(pieces))


def _tokens(value: Value) -> Iterator[bytes]:
    """Yields the text of a value token by token, without recursion."""
    containers: list[tuple[Iterator[Any], bytes]] = []
    prefix, is_first = b"", True
    while True:
        if isinstance(value, float) and not math.isfinite(value):
            yield prefix
            return
        yield prefix + _opening(value)
        if isinstance(value, Object):
            containers.append((iter(value.members), b"}"))
            is_first = True
        elif isinstance(value, list):
            containers.append((iter(value), b"]"))
            is_first = True
        while containers:
            items, closing = containers[-1]
            item: Any = next(items, _END)
            if item is not _END:
                break
            containers.pop()
            yield closing if is_first or closing == b"]" else _new_line(len(containers)) + closing
            is_first = False
        else:
            return
        if closing == b"]":
            value, prefix = item, b"" if is_first else b", "
        else:
            key, value = item
            yield (b"" if is_first else b",") + _new_line(len(containers)) + quote(key)
            prefix = b": "
        is_first = False


def _opening(value: Value) -> bytes:
    """Returns the text of a scalar, or a container's opening bracket."""
    if isinstance(value, Object):
        return b"{"
    if isinstance(value, list):
        return b"["
    if isinstance(value, bytes):
        return quote(value)
    if isinstance(value, float):
        return shortest_text(value)
    if value is None:
        return b"null"
    return str(value).lower().encode()


def _new_line(depth: int) -> bytes:
    return b"\n" + b"    " * depth


def base64_text(value: Value) -> bytes | None:
    """Returns the text of an object whose only member is a string named `b64`, else None."""
    if isinstance(value, Object) and len(value.members) == 1:
        key, text = value.members[0]
        if key == b"b64" and isinstance(text, bytes):
            return text
    return None


def is_plain_object(value: Value) -> TypeGuard[Object]:
    """Whether a value is an object, and not one that stands for base64 data."""
    return isinstance(value, Object) and base64_text(value) is None


def body_error(body: Object, what: str) -> InvalidArgument:
    """Returns the error for a body that is not formatted correctly."""
    return InvalidArgument(f"JSON Value: {debug_text(body)} {what}")


def decode_base64(text: bytes) -> bytes:
    """Decode base64: standard alphabet, blanks anywhere, padded in full (with `=` or `.`) or not at all.

    Raises `InvalidArgument`.
    """
    text = text.translate(None, _BASE64_SPACE)
    digits = text.rstrip(b"=.")
    missing = -len(digits) % 4
    if missing == 3 or len(text) - len(digits) not in (0, missing) or digits.translate(None, _BASE64_ALPHABET):
        raise InvalidArgument("Unable to base64 decode")
    return binascii.a2b_base64(digits + b"=" * missing)
