"""Parses protobuf's text format, used by configuration files."""

from __future__ import annotations

import re
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from triglot.core.errors import InvalidArgument
from triglot.pb import POOL

M = TypeVar("M", bound=Message)
_APART = re.compile(
    r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\#[^\n]*)|-((?:[ \t\r\n\f\v]|\#[^\n]*\n)+)(?=[0-9.A-Za-z])"""
)
"""A string or a comment, or a minus with blanks and comments between it and its number."""


def parse_text(text: bytes, name: str, message_class: type[M]) -> M:
    """Parse a message in protobuf's text format. Raise `InvalidArgument` with the place in file `name`."""
    try:
        return text_format.Parse(_with_signs_joined(text.decode()), message_class(), descriptor_pool=POOL)
    except Exception as error:  # ParseError, and ValueError for numbers that no field can hold.
        raise InvalidArgument(f"Invalid protobuf file: '{name}': {error}") from None


def _with_signs_joined(text: str) -> str:
    """Return the text with each minus right before its number, on the lines on which the numbers were.

    In the text format, as Triton's and TensorFlow Serving's C++ parsers read it, a sign is a token of its own;
    Python's parser (protobuf 7.36) reads none apart from its number.
    """
    return _APART.sub(lambda found: found[1] or found[2] + "-", text)
