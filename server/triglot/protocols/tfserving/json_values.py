"""JSON values in TensorFlow Serving's errors (tfs 4.3), and base64 (tfs 4.2)."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Iterator
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
_END = b"end"


def raw(text: str) -> bytes:
    """Return the bytes of a string; surrogates stand for bytes that are not UTF-8."""
    return text.encode(errors="surrogateescape")


def json_type(value: Any) -> str:
    """Return the type of a value as error texts name it."""
    if value is None:
        return "Null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return "Number"
    if isinstance(value, str):
        return "String"
    return "Object" if isinstance(value, dict) else "Array"


def quote(text: bytes) -> bytes:
    """Return a JSON string; bytes from 0x7f on are kept as they are, UTF-8 or not."""
    return b'"' + _CONTROL.sub(lambda match: _ESCAPES[match[0]], text) + b'"'


def text_of(text: str) -> str:
    """Return a name or string for an error text; bytes that are not UTF-8 become U+FFFD."""
    return text if text.isascii() else raw(text).decode(errors="replace")


def debug_text(value: Any) -> str:
    """Return a value as error texts quote it: indented by four, arrays on one line, cut after `QUOTED_BYTES`.

    The text ends before the first NaN or infinity.
    """
    pieces: list[bytes] = []
    size = 0
    for token in _tokens(value, 0, b""):
        if token is _END:
            break
        pieces.append(token)
        size += len(token)
        if size >= QUOTED_BYTES:
            break
    return b"".join(pieces).decode(errors="replace")


def _tokens(value: Any, level: int, prefix: bytes) -> Iterator[bytes]:
    """Yield the text of a value token by token. The recursion is as deep as there are tokens, at most."""
    if isinstance(value, dict):
        yield prefix + b"{"
        for at, (key, item) in enumerate(value.items()):
            yield (b"," if at else b"") + _new_line(level + 1) + quote(raw(key))
            yield from _tokens(item, level + 1, b": ")
        yield (_new_line(level) if value else b"") + b"}"
    elif isinstance(value, list):
        yield prefix + b"["
        for at, item in enumerate(value):
            yield from _tokens(item, level + 1, b", " if at else b"")
        yield b"]"
    elif isinstance(value, float):
        yield prefix + (shortest_text(value) if math.isfinite(value) else b"")
        if not math.isfinite(value):
            yield _END
    elif isinstance(value, str):
        yield prefix + quote(raw(value))
    else:
        yield prefix + (b"null" if value is None else str(value).lower().encode())


def _new_line(level: int) -> bytes:
    return b"\n" + b"    " * level


def base64_text(value: Any) -> str | None:
    """Return the text of an object whose only member is a string named `b64`, else None."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(text := value.get("b64"), str):
        return text
    return None


def is_plain_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value is an object, and not one that stands for base64 data."""
    return isinstance(value, dict) and base64_text(value) is None


def body_error(body: dict[str, Any], what: str) -> InvalidArgument:
    """Return the error for a body that is not formatted correctly."""
    return InvalidArgument(f"JSON Value: {debug_text(body)} {what}")


def signature_name_of(body: dict[str, Any]) -> str:
    """Return a request's `signature_name`, "" if it has none. Raise `InvalidArgument` if it is not a string."""
    name = body.get("signature_name")
    if name is None:
        return ""
    if not isinstance(name, str):
        raise body_error(body, "not formatted correctly. 'signature_name' key must be a string value.")
    return text_of(name)


def decode_base64(text: str) -> bytes:
    """Decode base64: standard alphabet, blanks anywhere, padded in full (with `=` or `.`) or not at all.

    Raise `InvalidArgument`.
    """
    given = raw(text).translate(None, _BASE64_SPACE)
    digits = given.rstrip(b"=.")
    missing = -len(digits) % 4
    if missing == 3 or len(given) - len(digits) not in (0, missing) or digits.translate(None, _BASE64_ALPHABET):
        raise InvalidArgument("Unable to base64 decode")
    return binascii.a2b_base64(digits + b"=" * missing)
