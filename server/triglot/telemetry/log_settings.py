"""The server's log settings, as clients read and change them (spec 3.11).

The level of the logger `triglot` is the lowest enabled one, and a filter drops records of disabled levels. The
filter is added to the command line's handler, or else, since loggers do not inherit filters, to each of our
loggers. The root logger and other libraries' loggers stay untouched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, MutableSequence

from triglot import parts
from triglot.core.errors import InvalidArgument, Unimplemented
from triglot.telemetry.calls import Observer
from triglot.telemetry.json_lines import JsonFormatter
from triglot.telemetry.log_handlers import LineFormatter
from triglot.telemetry.loggers import ACCESS, DATES, MODELS, OURS

FILE, FORMAT, VERBOSE = "log_file", "log_format", "log_verbose_level"
SWITCHES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
KEYS = (FILE, *SWITCHES, VERBOSE, FORMAT)
MAX_VERBOSE = 2**32 - 1
DEFAULT, ISO8601, JSON = "default", "ISO8601", "json"
FORMATS = (DEFAULT, ISO8601)
"""The formats that a client may select."""

Value = bool | int | str


def formatter(name: str, worker: int = 0) -> logging.Formatter:
    """Return the formatter of a `log_format`. With several workers each line has its `worker`; 0: only one."""
    if name == JSON:
        return JsonFormatter({"worker": worker} if worker else {})
    source = f"worker {worker}: " if worker else ""
    made = LineFormatter(f"%(asctime)s %(levelname).1s {source}%(message)s", DATES[name == ISO8601])
    if name == ISO8601:
        made.converter = time.gmtime
    return made


class LogSettings:
    """The current log settings. `handler` writes the log to `file`; None: the embedding program handles the log.

    The access log is added to `observers` where they ask for it. `access_lines`: there is an access line per
    request, whatever the settings are. For `worker` see `formatter`. Raise `MissingPart` without the access log.
    """

    def __init__(
        self,
        observers: MutableSequence[Observer],
        handler: logging.Handler | None = None,
        *,
        file: str = "",
        worker: int = 0,
        log_format: str = DEFAULT,
        verbose_level: int = 0,
        access_lines: bool = False,
    ) -> None:
        self._observers = observers
        self._access: Observer | None = None
        self._access_lines = access_lines
        self._handler = handler
        self._worker = worker
        self._logger = logging.getLogger(OURS)
        self._access_logger, self._models_logger = logging.getLogger(ACCESS), logging.getLogger(MODELS)
        self._level, self._access_level = self._logger.level, self._access_logger.level
        self._models_level = self._models_logger.level
        self._filtered: list[logging.Filterer] = []
        # What the user configured, as far as these settings can express it.
        self._least = self._logger.getEffectiveLevel()
        self._on = {key: self._logger.isEnabledFor(level) for key, level in SWITCHES.items()}
        self._values: dict[str, Value] = {FILE: file, VERBOSE: verbose_level, FORMAT: log_format}
        if verbose_level or access_lines:
            self._apply()

    def settings(self) -> dict[str, Value]:
        """Return every setting."""
        values: dict[str, Value] = {**self._values, **self._on}
        return {key: values[key] for key in KEYS}

    def update(self, changes: Mapping[str, Value | None]) -> None:
        """Change settings, all of them or, when it raises, none; None leaves one unchanged.

        Raise `InvalidArgument` for an unknown key or an invalid value, and `Unimplemented` for a setting that
        cannot be changed over the network, or needs a part that is not there.
        """
        values = {key: self._checked(key, value) for key, value in changes.items() if value is not None}
        for key in changes:
            _check_key(key)
        if not values:
            return
        for key, value in values.items():
            if key in SWITCHES:
                self._on[key] = bool(value)
            else:
                self._values[key] = value
        if FORMAT in values and self._handler is not None:
            self._handler.setFormatter(formatter(str(values[FORMAT]), self._worker))
        self._apply()

    def close(self) -> None:
        """Restore the levels and filters of the loggers."""
        for filtered in self._filtered:
            filtered.removeFilter(self._passes)
        self._filtered = []
        self._logger.setLevel(self._level)
        self._access_logger.setLevel(self._access_level)
        self._models_logger.setLevel(self._models_level)
        if self._access is not None:
            self._access.switch(0)

    def _checked(self, key: str, value: Value) -> Value:
        _check_key(key)
        if key == FILE:
            raise Unimplemented(f"{FILE} cannot be changed over the network, only by the server's option log_file")
        if key in SWITCHES:
            if not isinstance(value, bool):
                raise InvalidArgument(f"{key}: expected true or false, got {value!r:.100}")
        elif key == VERBOSE:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VERBOSE:
                raise InvalidArgument(f"{key}: expected an integer from 0 to {MAX_VERBOSE}, got {value!r:.100}")
            try:
                self._access_log(int(value))
            except parts.MissingPart as error:
                raise Unimplemented(f"{key}: {error}") from error
        elif value == self._values[FORMAT]:
            pass  # Whatever it is: a client may send back the value that it read.
        elif value not in FORMATS:
            raise InvalidArgument(f"{key}: expected '{DEFAULT}' or '{ISO8601}', got {value!r:.100}")
        elif self._handler is None:
            raise Unimplemented(f"{key}: cannot be changed, as the embedding program writes the log")
        elif self._values[FORMAT] == JSON:
            raise Unimplemented(
                f"{key}: cannot be changed over the network from '{JSON}', which its readers expect"
            )
        return value

    def _access_log(self, level: int) -> Observer | None:
        """Return the access log, if it is there or needed for this level. Raise `MissingPart`."""
        if self._access is None and level:
            access: Observer = parts.load("observer", "access log")()
            self._access = access
            self._observers.append(access)
        return self._access

    @property
    def _access_detail(self) -> int:
        """The level of the access log, see `Observer.switch`."""
        return 2 if self._values[VERBOSE] else int(self._access_lines)

    def _apply(self) -> None:
        """Apply the settings to the loggers. Raise `MissingPart`."""
        verbose, detail = bool(self._values[VERBOSE]), self._access_detail
        if (access := self._access_log(detail)) is not None:
            access.switch(detail)
        self._access_logger.setLevel(logging.INFO if detail else self._access_level)
        self._models_logger.setLevel(logging.DEBUG if verbose else self._models_level)
        least = min((level for key, level in SWITCHES.items() if self._on[key]), default=logging.CRITICAL)
        # A lower level that the user configured is controlled by info: Triton has no switch for it.
        self._logger.setLevel(min(least, self._least) if least == logging.INFO else least)
        for filterer in [self._handler] if self._handler is not None else _our_loggers():
            if filterer not in self._filtered:
                filterer.addFilter(self._passes)
                self._filtered.append(filterer)

    def _passes(self, record: logging.LogRecord) -> bool:
        if record.name != OURS and not record.name.startswith(OURS + "."):
            return True
        if record.name == ACCESS:
            return bool(self._access_detail)
        if record.name == MODELS and record.levelno < logging.INFO:
            return True
        if record.levelno >= logging.CRITICAL:
            return True
        kind = max((level for level in SWITCHES.values() if level <= record.levelno), default=logging.INFO)
        return self._on[next(key for key, level in SWITCHES.items() if level == kind)]


def _check_key(key: str) -> None:
    if key not in KEYS:
        raise InvalidArgument(f"unknown log setting '{key[:100]}', expected {', '.join(KEYS)}")


def _our_loggers() -> Iterator[logging.Logger]:
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == OURS or name.startswith(OURS + ".")):
            yield logger
