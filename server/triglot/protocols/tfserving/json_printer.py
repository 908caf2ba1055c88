"""JSON as TensorFlow Serving prints it: in errors (tfs 4.3), and in responses (tfs 4.4). Pure functions.

Responses are indented by four, with lists on one line or one item per line. A *level* is the number of containers
around a text.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeGuard

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import loads
from triglot.core.tensor import Array

_TOKENS: Final = {b"nan": b"NaN", b"inf": b"Infinity", b"-inf": b"-Infinity"}
_HIDDEN_BIT: Final = 1 << 52
_MASK: Final = (1 << 64) - 1


QUOTED_BYTES: Final = 256
"""An error text quotes a value up to the token that reaches this number of bytes."""
_CONTROL: Final = re.compile(rb'["\\\x00-\x1f]')
_ESCAPES: Final = {bytes([code]): b"\\u%04X" % code for code in range(0x20)} | {
    b'"': b'\\"',
    b"\\": b"\\\\",
    b"\b": b"\\b",
    b"\f": b"\\f",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\t": b"\\t",
}
_BASE64_SPACE: Final = b" \t\n\v\f\r"
_BASE64_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_END: Final = b"end"


# --- values, in errors, and base64 (tfs 4.2) ---


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


# --- numbers ---


def decimal_texts(values: Array) -> list[bytes]:
    """Return the texts of a flat FP32 or FP64 array: six digits if they are exact enough, else 9 (FP64: 17)."""
    numbers: list[float] = values.tolist()
    # All at once: formatting them one by one takes twice as long, and reading them five times.
    line = (b"%g," * len(numbers) % tuple(numbers))[:-1]
    texts = line.split(b",") if numbers else []
    try:
        rounded = loads(b"[%b]" % line)
    except ValueError:  # NaN or infinities.
        rounded = list(map(float, texts))
    # Rounding the greatest number to six digits makes it smaller, so nothing becomes infinite here.
    others: list[int] = (np.array(rounded, values.dtype) != values).nonzero()[0].tolist()
    if others:
        digits = b"%.9g " if values.dtype.itemsize == 4 else b"%.17g "
        exact = (digits * len(others) % tuple([numbers[at] for at in others])).split()
        for at, text in zip(others, exact, strict=True):
            texts[at] = text
    if b"".join(texts).count(b".") == len(texts):
        return texts
    return [text if b"." in text or b"e" in text else _TOKENS.get(text) or text + b".0" for text in texts]


def shortest_text(value: float) -> bytes:
    """Return a finite number in few digits that read back to it, as RapidJSON's writer prints it.

    The digits are those of the Grisu2 algorithm, which are not always the nearest ones.
    """
    if value == 0:
        return b"-0.0" if np.signbit(value) else b"0.0"
    sign = "-" if value < 0 else ""
    number, exponent = _grisu2(abs(value))
    return (sign + _layout(str(number), exponent)).encode()


def _layout(digits: str, exponent: int) -> str:
    """Return the text of digits · 10^exponent."""
    point = len(digits) + exponent
    if exponent >= 0 and point <= 21:
        return digits + "0" * exponent + ".0"
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return "0." + "0" * -point + digits
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{rest}e{point - 1}"


def _grisu2(value: float) -> tuple[int, int]:
    """Return digits and a decimal exponent, from the value and its two boundaries scaled by one power of ten.

    All are 64-bit significands with the exponent of the upper boundary (Loitsch 2010).
    """
    bits = int.from_bytes(struct.pack(">d", value), "big")
    biased, significand = bits >> 52, bits & (_HIDDEN_BIT - 1)
    if biased:
        significand |= _HIDDEN_BIT
    binary = max(biased, 1) - 1075
    upper = 2 * significand + 1
    shift = 64 - upper.bit_length()
    top = binary - 1 - shift
    if significand == _HIDDEN_BIT:
        lower = (4 * significand - 1) << (binary - 2 - top)
    else:
        lower = (2 * significand - 1) << (binary - 1 - top)
    power, power_exponent, exponent = _power_of_ten(top)
    high = _product(upper << shift, power) - 1
    low = _product(lower, power) + 1
    gap = high - _product(significand << (binary - top), power)
    return _digits(high, high - low, gap, -(top + power_exponent + 64), exponent)


def _product(factor: int, other: int) -> int:
    """Return the upper half of a 128-bit product, rounded."""
    return (factor * other + (1 << 63)) >> 64


@cache
def _power_of_ten(top: int) -> tuple[int, int, int]:
    """Return the fitting one of 10^-348, 10^-340, …

    It is a 64-bit significand, its binary exponent, and the decimal exponent that undoes it.
    """
    steps = -(-(-61 - top) * 30102999566398114 // 10**17) + 347
    decimal = -348 + ((steps >> 3) + 1) * 8
    numerator, denominator = (10**decimal, 1) if decimal >= 0 else (1, 10**-decimal)
    binary = numerator.bit_length() - denominator.bit_length() - 64
    if numerator << max(-binary, 0) >= denominator << max(binary, 0) + 64:
        binary += 1
    numerator <<= max(-binary, 0)
    denominator <<= max(binary, 0)
    return (2 * numerator + denominator) // (2 * denominator), binary, -decimal


def _digits(high: int, delta: int, gap: int, shift: int, exponent: int) -> tuple[int, int]:
    """Return the fewest leading digits of `high` within `delta` below it, rounded towards the value at `gap`."""
    unit = 1 << shift
    integer, rest = high >> shift, high & (unit - 1)
    number = 0
    for place in range(len(str(integer)) - 1, -1, -1):
        digit, integer = divmod(integer, 10**place)
        number = number * 10 + digit
        left = (integer << shift) + rest
        if left <= delta:
            return _grisu_round(number, delta, left, 10**place << shift, gap), exponent + place
    place = 0
    while True:
        rest, delta, place = rest * 10, delta * 10, place - 1
        number = number * 10 + (rest >> shift)
        rest &= unit - 1
        if rest < delta:
            # The original's table of powers ends here.
            scaled = gap * 10**-place & _MASK if place > -9 else 0
            return _grisu_round(number, delta, rest, unit, scaled), exponent + place


def _grisu_round(number: int, delta: int, rest: int, unit: int, gap: int) -> int:
    while rest < gap and delta - rest >= unit and (rest + unit < gap or gap - rest > rest + unit - gap):
        number -= 1
        rest += unit
    return number


# --- layout, of texts that are JSON already ---


def print_answer(key: str, value: bytes) -> bytes:
    """Return a body: an object with one member."""
    return print_object({key: value}, 0)


def print_floats(values: Iterable[float]) -> list[bytes]:
    """Return the texts of FP32 numbers."""
    return decimal_texts(np.array(values, np.float32))


def print_line(items: list[bytes]) -> bytes:
    """Return a list on one line."""
    return b"[" + b", ".join(items) + b"]"


def print_rows(items: list[bytes]) -> bytes:
    """Return the top-level list, on one line but for its closing bracket."""
    return b"[" + b", ".join(items) + _new_line(1) + b"]" if items else b"[]"


def print_lines(items: list[bytes], level: int) -> bytes:
    """Return a list at `level` with one item per line."""
    if not items:
        return b"[]"
    start = _new_line(level + 1)
    return b"[" + start + (b"," + start).join(items) + _new_line(level) + b"]"


def print_object(members: Mapping[str, bytes], level: int) -> bytes:
    """Return an object at `level` with at least one member."""
    start = _new_line(level + 1)
    texts = [quote(name.encode()) + b": " + text for name, text in members.items()]
    return b"{" + start + (b"," + start).join(texts) + _new_line(level) + b"}"


def _new_line(level: int) -> bytes:
    return b"\n" + b"    " * level
