"""`Logger`: a model's lines in the server's log."""

from __future__ import annotations

import enum
import logging
from typing import ClassVar

from triglot.telemetry.loggers import MODELS

log = logging.getLogger(MODELS)


class LogLevel(enum.IntEnum):
    """Triton's levels."""

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
        """A line of that level."""
        log.log(_LEVELS[LogLevel(level)], "%s", message, stacklevel=2)

    @staticmethod
    def log_info(message: str) -> None:
        """A line of information."""
        log.info("%s", message, stacklevel=2)

    @staticmethod
    def log_warn(message: str) -> None:
        """A warning."""
        log.warning("%s", message, stacklevel=2)

    @staticmethod
    def log_error(message: str) -> None:
        """An error."""
        log.error("%s", message, stacklevel=2)

    @staticmethod
    def log_verbose(message: str) -> None:
        """A line for those who look closely."""
        log.debug("%s", message, stacklevel=2)
