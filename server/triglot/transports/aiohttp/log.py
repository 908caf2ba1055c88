"""What aiohttp logs of connections. Whoever sends it something that is no HTTP is no error of the server's."""

from __future__ import annotations

import logging
import re

from aiohttp.http_exceptions import HttpProcessingError

LONGEST_TEXT = 200
"""Of what was wrong."""
_QUOTED = re.compile(r""": b?['"]""")


def connection_log() -> logging.Logger:
    """Where aiohttp logs: a malformed request is one line of information, without a trace."""
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
    """Without what was sent, which aiohttp quotes: it may be a credential, and logs have none."""
    return _QUOTED.split(" ".join(error.message.split()), maxsplit=1)[0][:LONGEST_TEXT]
