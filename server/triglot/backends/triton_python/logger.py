"""`Logger`: writes a model's messages to the server's log."""

from __future__ import annotations

import enum
import logging
from typing import ClassVar

from triglot.telemetry.loggers import MODELS

log = logging.getLogger(MODELS)


class LogLevel(enum.IntEnum):
    """Triton's log levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class Logger:
    """Writes to the server's log."""

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Log a message with a level."""
        log.log(_LEVELS[LogLevel(level)], "%s", message, stacklevel=2)

    @staticmethod
    def log_info(message: str) -> None:
        """Log information."""
        log.info("%s", message, stacklevel=2)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log a warning."""
        log.warning("%s", message, stacklevel=2)

    @staticmethod
    def log_error(message: str) -> None:
        """Log an error."""
        log.error("%s", message, stacklevel=2)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log a verbose message."""
        log.debug("%s", message, stacklevel=2)
