"""Compression of responses: what a client accepts, and when it is worth it (spec 3.4).

Strategy: a client that names one coding, or gives weights, wants it. Most libraries name all codings that they
support with every request, and then compressing a tensor often takes longer than sending it: their responses
are compressed only if a sample of the first bytes shrinks enough.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's window bits for each coding."""
LEVEL = 1
"""The fastest level: networks for tensors are not slow."""
DEFLATED_WORK = 8
"""Compressing a byte takes as long as processing this many bytes of text."""
SAMPLE_BYTES = 16 * 1024
WORTH = 0.5
"""The ratio that a sample has to shrink to."""
_QUALITY = re.compile(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The coding that a client prefers; `asked`: it wants this coding, and does not only support it."""

    coding: str
    asked: bool


def accepted(header: str) -> Accepted:
    """Return the coding with the highest weight in an Accept-Encoding header: gzip, deflate or identity.

    Among equals the first. Other codings, "*", and invalid parts are ignored.
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
    """Return the weight; 0.0 for an invalid one."""
    if not rule:
        return 1.0
    found = _QUALITY.fullmatch(rule.replace(" ", ""))
    return float(found[1]) if found else 0.0


def deflate(body: bytes, preference: Accepted) -> bytes | None:
    """Return the compressed body; None if that is not worth it. The wish must not be identity."""
    bits = WINDOW_BITS[preference.coding]
    if not preference.asked:
        sample = body[:SAMPLE_BYTES]
        if len(_compressed(sample, bits)) > WORTH * len(sample):
            return None
    return _compressed(body, bits)


def _compressed(body: bytes, bits: int) -> bytes:
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, bits)
    return compressor.compress(body) + compressor.flush()
