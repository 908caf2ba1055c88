"""Texts that a model gives. Triton's utilities take `str` and `bytes` alike, as elements of BYTES tensors are."""

from __future__ import annotations


def text(value: object, what: str) -> str:
    """`value` as a `str`. Raises `TypeError` for neither `str` nor `bytes`, `UnicodeDecodeError` for no UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"{what}: expected a str or bytes, got {type(value).__name__}")
