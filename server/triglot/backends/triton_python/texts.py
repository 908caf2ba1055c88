"""Converts texts of a model. Triton's utility module accepts `str` and `bytes`, as BYTES elements are."""

from __future__ import annotations


def text(value: object, what: str) -> str:
    """Return `value` as a `str`. Raise `TypeError` for other types, `UnicodeDecodeError` for invalid UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"{what}: expected a str or bytes, got {type(value).__name__}")
