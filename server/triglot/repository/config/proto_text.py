"""Parses protobuf's text format, used by configuration files."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from triglot.core.errors import InvalidArgument
from triglot.pb import POOL

M = TypeVar("M", bound=Message)


def parse_text(text: bytes, name: str, message_class: type[M]) -> M:
    """Parses a message in protobuf's text format. Raises `InvalidArgument` with the place in file `name`."""
    try:
        return text_format.Parse(text.decode(), message_class(), descriptor_pool=POOL)
    except Exception as error:  # ParseError, and ValueError for numbers that no field can hold.
        raise InvalidArgument(f"Invalid protobuf file: '{name}': {error}") from None
