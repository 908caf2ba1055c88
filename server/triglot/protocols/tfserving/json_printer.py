"""Layout of TensorFlow Serving's JSON: indented by four, lists on one line or one item per line (tfs 4.4).

Pure functions of texts that are JSON already. A *level* is the number of containers around a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from triglot.protocols.tfserving.json_numbers import decimal_texts
from triglot.protocols.tfserving.json_values import quote


def print_answer(key: str, value: bytes) -> bytes:
    """Return a body: an object with one member."""
    return print_object({key: value}, 0)


def print_floats(values: Iterable[float]) -> list[bytes]:
    """Return the texts of FP32 numbers."""
    return [text.encode() for text in decimal_texts(np.array(values, np.float32))]


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
