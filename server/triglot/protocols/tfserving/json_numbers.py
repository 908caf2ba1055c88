"""Numbers as TensorFlow Serving prints them: in responses (tfs 4.4) and in error texts (tfs 4.3)."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np

from triglot.core.tensor import Array

_TOKENS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_HIDDEN_BIT = 1 << 52
_MASK = (1 << 64) - 1


def decimal_texts(values: Array) -> list[str]:
    """Return the texts of a flat FP32 or FP64 array: six digits if they are exact enough, else 9 (FP64: 17)."""
    numbers: list[float] = values.tolist()
    # All at once: formatting them one by one takes twice as long.
    texts = ("%g " * len(numbers) % tuple(numbers)).split()
    # Rounding the greatest number to six digits makes it smaller, so nothing becomes infinite here.
    read_back = np.array(list(map(float, texts)), values.dtype)
    others: list[int] = (read_back != values).nonzero()[0].tolist()
    digits = "%.9g " if values.dtype.itemsize == 4 else "%.17g "
    exact = (digits * len(others) % tuple([numbers[at] for at in others])).split()
    for at, text in zip(others, exact, strict=True):
        texts[at] = text
    return [text if "." in text or "e" in text else _TOKENS.get(text) or text + ".0" for text in texts]


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


def _product(one: int, other: int) -> int:
    """Return the upper half of a 128-bit product, rounded."""
    return (one * other + (1 << 63)) >> 64


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
    one = 1 << shift
    integer, rest = high >> shift, high & (one - 1)
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
        rest &= one - 1
        if rest < delta:
            # The original's table of powers ends here.
            scaled = gap * 10**-place & _MASK if place > -9 else 0
            return _grisu_round(number, delta, rest, one, scaled), exponent + place


def _grisu_round(number: int, delta: int, rest: int, unit: int, gap: int) -> int:
    while rest < gap and delta - rest >= unit and (rest + unit < gap or gap - rest > rest + unit - gap):
        number -= 1
        rest += unit
    return number
