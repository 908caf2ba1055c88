"""Compressed answers: what a client accepts, and when it is worth it (spec 3.4).

Strategy: a client that names one coding, or weighs several, asks for it. Most libraries name all that they can
read with every request, and then compressing a tensor costs more time than sending it saves: such a client gets
it where the first bytes of the answer show that little is left of them.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's parameter for each coding."""
LEVEL = 1
"""The quickest: the network that a tensor is compressed for is not a slow one."""
DEFLATED_WORK = 8
"""To compress a byte takes as long as so many bytes of text."""
SAMPLE_BYTES = 16 * 1024
WORTH = 0.5
"""What a sample has to shrink to."""
_QUALITY = re.compile(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The coding that a client likes best; `asked`: it is its choice, not only what it can read."""

    coding: str
    asked: bool


def accepted(header: str) -> Accepted:
    """What an Accept-Encoding header means: of gzip, deflate and identity the one with the highest weight.

    Of equals the first. Everything else in it is left aside, "*" and what is not understood, too.
    """
    weights: dict[str, float] = {}
    names = 0
    weighed = False
    for part in header.lower().split(","):
        name, _, rule = (text.strip() for text in part.partition(";"))
        if not name:
            continue
        names += 1
        weight = _weight(rule)
        weighed |= bool(rule)
        name = name.removeprefix("x-")
        if weight and (name in WINDOW_BITS or name == "identity"):
            weights.setdefault(name, weight)
    coding = max(weights, key=lambda name: weights[name], default="identity")
    return Accepted(coding, weighed or names == 1)


def _weight(rule: str) -> float:
    """0 for what is no weight."""
    if not rule:
        return 1.0
    found = _QUALITY.fullmatch(rule.replace(" ", ""))
    return float(found[1]) if found else 0.0


def deflate(body: bytes, wish: Accepted) -> bytes | None:
    """The body in the coding that is wished for, which is not identity; None where it is not worth it."""
    bits = WINDOW_BITS[wish.coding]
    if not wish.asked:
        sample = body[:SAMPLE_BYTES]
        if len(_compressed(sample, bits)) > WORTH * len(sample):
            return None
    return _compressed(body, bits)


def _compressed(body: bytes, bits: int) -> bytes:
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, bits)
    return compressor.compress(body) + compressor.flush()
