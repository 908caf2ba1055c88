"""`TritonError` and `TritonModelException`, and their conversion from and to the server's errors (spec 1.5)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

from triglot.core.errors import (
    Cancelled,
    Code,
    Internal,
    InvalidArgument,
    NotFound,
    ServingError,
    Unavailable,
    Unimplemented,
)


class TritonModelException(Exception):
    """Raised by the utility module for invalid use, and by models for any reason."""


class TritonErrorCode(enum.IntEnum):
    """Triton's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_ERRORS: Mapping[TritonErrorCode, type[ServingError]] = MappingProxyType(
    {
        TritonErrorCode.INTERNAL: Internal,
        TritonErrorCode.NOT_FOUND: NotFound,
        TritonErrorCode.INVALID_ARG: InvalidArgument,
        TritonErrorCode.UNAVAILABLE: Unavailable,
        TritonErrorCode.UNSUPPORTED: Unimplemented,
        TritonErrorCode.CANCELLED: Cancelled,
    }
)
_CODES: Mapping[Code, TritonErrorCode] = MappingProxyType(
    {
        **{error.code: code for code, error in _ERRORS.items()},
        Code.ALREADY_EXISTS: TritonErrorCode.ALREADY_EXISTS,
        Code.DEADLINE_EXCEEDED: TritonErrorCode.UNAVAILABLE,
        Code.FAILED_PRECONDITION: TritonErrorCode.UNAVAILABLE,
        Code.RESOURCE_EXHAUSTED: TritonErrorCode.UNAVAILABLE,
    }
)


class TritonError:
    """The error of one response; not an exception."""

    UNKNOWN: ClassVar[TritonErrorCode] = TritonErrorCode.UNKNOWN
    INTERNAL: ClassVar[TritonErrorCode] = TritonErrorCode.INTERNAL
    NOT_FOUND: ClassVar[TritonErrorCode] = TritonErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[TritonErrorCode] = TritonErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[TritonErrorCode] = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[TritonErrorCode] = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[TritonErrorCode] = TritonErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[TritonErrorCode] = TritonErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str | bytes, code: TritonErrorCode = TritonErrorCode.INTERNAL) -> None:
        try:
            self._code = TritonErrorCode(code)
        except ValueError:
            names = ", ".join(code.name for code in TritonErrorCode)
            raise TypeError(f"TritonError: code: expected one of TritonError's {names}, got {code!r}") from None
        self._message = text(message, "TritonError: message")

    @classmethod
    def of(cls, error: ServingError) -> Self:
        """Return another model's error for the model that called it."""
        return cls(error.message, _CODES.get(error.code, TritonErrorCode.UNKNOWN))

    def code(self) -> TritonErrorCode:
        """Return the error code."""
        return self._code

    def message(self) -> str:
        """Return the error text."""
        return self._message

    def __str__(self) -> str:
        return self._message

    def serving_error(self) -> ServingError:
        """Return the error for the client."""
        kind = _ERRORS.get(self._code)
        if kind is not None:
            return kind(self._message)
        exists = self._code is TritonErrorCode.ALREADY_EXISTS
        return ServingError(self._message, code=Code.ALREADY_EXISTS if exists else Code.UNKNOWN)


def text(value: object, what: str) -> str:
    """Return `value` as a `str`. Raise `TypeError` for other types, `UnicodeDecodeError` for invalid UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"{what}: expected a str or bytes, got {type(value).__name__}")
