"""The log of an instance's process, which follows the server's: same format, destination and levels.

Strategy: the server sends the enabled levels when they have changed. It derives them from the loggers themselves,
so they follow changes of any origin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from triglot.telemetry.json_lines import JsonFormatter
from triglot.telemetry.log_handlers import LineFormatter, LogFile, LogStream, log_handler
from triglot.telemetry.loggers import DATES, MODELS, OURS

_NAMES = (OURS, MODELS)
_KINDS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_KINDS_OF_HANDLERS = (LogStream, LogFile, logging.StreamHandler, logging.FileHandler)
Switches = Mapping[str, Any]
"""The enabled levels by name of a logger, and in "utc" whether times are in UTC."""


# --- in the server ---


def log_setup(*, remote: bool = False) -> dict[str, Any]:
    """Return the log settings that a process starts with. `remote`: it cannot write to the server's log file.

    Only the switches if the root logger has no handler of a known kind, as when an application has set up the log.
    """
    setup: dict[str, Any] = {"switches": switches()}
    if (handler := _handler()) is not None and (formatter := handler.formatter) is not None:
        setup["level"] = logging.getLogger().level
        setup["file"] = handler.baseFilename if isinstance(handler, logging.FileHandler) and not remote else ""
        if isinstance(formatter, JsonFormatter):
            setup["json"] = formatter.origin
        else:
            setup |= {"format": formatter._fmt, "dates": formatter.datefmt, "utc": _is_utc(formatter)}
    return setup


def switches() -> Switches:
    """Return what is enabled now."""
    handler = _handler()
    on = {name: [kind for kind in _KINDS if _is_on(name, kind, handler)] for name in _NAMES}
    return {**on, "utc": handler is not None and handler.formatter is not None and _is_utc(handler.formatter)}


def _handler() -> logging.Handler | None:
    """Return the first handler of the root logger that a process can reproduce; None without one."""
    handlers = logging.getLogger().handlers
    plain = (handler for handler in handlers if type(handler) in _KINDS_OF_HANDLERS)
    return next((handler for handler in plain if handler.formatter is not None), None)


def _is_on(name: str, kind: int, handler: logging.Handler | None) -> bool:
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(kind):
        return False
    record = logging.LogRecord(name, kind, "", 0, "", None, None)
    if not logger.filter(record):
        return False
    return handler is None or (kind >= handler.level and bool(handler.filter(record)))


def _is_utc(formatter: logging.Formatter) -> bool:
    return formatter.converter is time.gmtime


# --- in the process ---


class ProcessLog:
    """Sets up the process's log as the server's. `setup` is from `log_setup`; lines of JSON state `name`."""

    def __init__(self, setup: Mapping[str, Any], name: str) -> None:
        self._setup = setup
        self._switches: Switches = {}
        self._handler: logging.Handler | None = None
        if "level" in setup:
            self._handler = log_handler(setup["file"])
            self._handler.addFilter(self._passes)
            if "json" in setup:
                self._handler.setFormatter(JsonFormatter({**setup["json"], "process": name}))
                logging.captureWarnings(True)
            logging.basicConfig(level=setup["level"], handlers=[self._handler])
        self.follow(setup["switches"])

    def follow(self, switches: Switches) -> None:
        """Change the enabled levels and the time zone to these `switches`; none change nothing."""
        if not switches or switches == self._switches:
            return
        self._switches = switches
        for name in _NAMES:
            logging.getLogger(name).setLevel(min(switches[name], default=logging.CRITICAL + 1))
        if self._handler is not None and "format" in self._setup:
            utc = switches["utc"]
            dates = self._setup["dates"] if utc == self._setup["utc"] else DATES[utc]
            formatter = LineFormatter(self._setup["format"], dates)
            if utc:
                formatter.converter = time.gmtime
            self._handler.setFormatter(formatter)

    def _passes(self, record: logging.LogRecord) -> bool:
        name = record.name
        if name != OURS and not name.startswith(f"{OURS}."):
            return True
        kind = max((kind for kind in _KINDS if kind <= record.levelno), default=logging.DEBUG)
        return kind in self._switches[MODELS if name == MODELS else OURS]
