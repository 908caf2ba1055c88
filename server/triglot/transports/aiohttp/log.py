"""The log of aiohttp's connections. A client that sends invalid HTTP is not an error of the server."""

from __future__ import annotations

import logging
import re

from aiohttp.http_exceptions import HttpProcessingError

MAX_TEXT = 200
"""Longest error text in characters."""
_QUOTED = re.compile(r""": b?['"]""")


def connection_log() -> logging.Logger:
    """Returns the logger for aiohttp.

    It logs an invalid request in one line, as information, without a traceback.
    """
    log = logging.getLogger(__name__)
    log.addFilter(_one_line)
    return log


def _one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "rejected a malformed HTTP request: %s", (_text(error),)
        record.exc_info = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)
    return True


def _text(error: HttpProcessingError) -> str:
    """Returns the error without the client's data, which aiohttp quotes: a credential must not be logged."""
    return _QUOTED.split(" ".join(error.message.split()), maxsplit=1)[0][:MAX_TEXT]
