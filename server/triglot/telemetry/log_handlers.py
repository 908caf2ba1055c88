"""Log handlers and formatters: lines of bounded length, limited repeats, and no failure when a write fails.

Clients and models influence what is logged. So here, once for all calls, control characters are escaped, long
texts are truncated, and repeated lines are limited: per minute and kind to `MAX_LINES` lines and one traceback.
The kind of a record is the place of the logging call, with the type and origin of its exception. Omitted lines are
counted, and the count is logged with the first record after that minute.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import TimedRotatingFileHandler, WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO, cast

from triglot.core.errors import text_of
from triglot.telemetry.loggers import OURS

MAX_LINE = 4096
"""Limit on the characters of a message."""
MAX_TRACE = 16 * 1024
"""Limit on the characters of a traceback."""
MAX_LINES = 20
WINDOW_SECONDS = 60.0
LIMITED_LOGGERS = (
    *(f"{OURS}.{name}." for name in ("backends", "binding", "core", "dataplane", "engine", "model_calls")),
    *(f"{OURS}.{name}." for name in ("protocols", "transports")),
    "aiohttp.",
    "asyncio.",
    "grpc.",
)
"""Logger prefixes whose lines clients can cause; for other loggers only tracebacks are limited."""
PLACE = "raised_at"
"""Attribute of an exception class with the origin of exceptions that were raised in another process."""
OWN_LOGGER = f"{OURS}.log"
"""The logger of the log's own messages, which belong to no request."""
SAMPLE_LENGTH = 200
"""Characters of the message that is logged as an example of its kind."""


def escaped(text: str) -> str:
    """Return the text with unprintable characters escaped as in `repr`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


class LineFormatter(logging.Formatter):
    """Formats a record as one line; a traceback follows indented, so that its text cannot look like a log line."""

    def format(self, record: logging.LogRecord) -> str:
        """See the base class."""
        plain = copy.copy(record)
        plain.msg, plain.args = escaped(message_of(record)), None
        plain.exc_info = plain.exc_text = plain.stack_info = None
        lines = [super().format(plain)]
        if record.exc_info and record.exc_info[0] is not None:
            lines += _indented(traceback_of(self, record.exc_info))
        if record.stack_info:
            lines += _indented(stack_of(record.stack_info))
        return "\n".join(lines)


def message_of(record: logging.LogRecord) -> str:
    """Return the record's message, truncated."""
    message = record.getMessage()
    return message if len(message) <= MAX_LINE else f"{message[:MAX_LINE]}... ({len(message)} characters)"


def traceback_of(formatter: logging.Formatter, exc_info: Any) -> str:
    """Return the traceback as the formatter writes it, truncated."""
    try:
        return stack_of(formatter.formatException(exc_info))
    except BaseException as error:  # The exception's class may run code of its own for its causes.
        return f"{exc_info[0].__name__}: <no traceback: {type(error).__name__}>"


def stack_of(text: str) -> str:
    """Return a traceback or stack, truncated in the middle: its start and its end stay."""
    if len(text) <= MAX_TRACE:
        return text
    omitted = f"\n... ({len(text) - MAX_TRACE} characters omitted)\n"
    return text[: MAX_TRACE // 4] + omitted + text[-MAX_TRACE * 3 // 4 :]


def _indented(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield f"  {escaped(line)}"


@dataclass(slots=True)
class _Kind:
    """Counts of one kind of record within the minute. `sample`: the first message."""

    sample: str
    level: int
    lines: int = 0
    omitted: int = 0
    omitted_traces: int = 0


class RepeatLimiter:
    """Limits repeated lines, see the module docstring. Not thread-safe: its handler holds a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[object, _Kind] = {}
        self._until = 0.0

    def limit(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """Return the records to log now: this one, perhaps without its traceback, and counts of omitted ones."""
        now = self._clock()
        records = self.counts() if now >= self._until else []
        key = _key(record)
        if key is None:
            return [*records, record]
        if not self._kinds:
            self._until = now + WINDOW_SECONDS
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(record.getMessage()[:SAMPLE_LENGTH], record.levelno)
        if kind.lines >= MAX_LINES and _is_limited(record.name):
            kind.omitted += 1
            return records
        kind.lines += 1
        error = _error(record)
        if error is not None and kind.lines > 1:
            kind.omitted_traces += 1
            message = record.getMessage()
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
            record.msg, record.args = "%s: %s: %s", (message, type(error).__name__, text_of(error))
        return [*records, record]

    def counts(self) -> list[logging.LogRecord]:
        """Return records with the numbers of omitted lines since the last call, one per kind."""
        kinds, self._kinds = self._kinds, {}
        return [_count(kind) for kind in kinds.values() if kind.omitted or kind.omitted_traces]


def _count(kind: _Kind) -> logging.LogRecord:
    if kind.omitted_traces:
        text = "%d similar errors in the last minute, %d of them not logged, the others without a traceback: %s"
        return _record(kind.level, text, kind.omitted_traces + kind.omitted, kind.omitted, kind.sample)
    return _record(kind.level, "%d similar lines in the last minute not logged: %s", kind.omitted, kind.sample)


def _key(record: logging.LogRecord) -> object:
    """Return the kind of a record; None if it is not limited."""
    call = record.name, record.pathname, record.lineno
    error = _error(record)
    if error is None:
        return call if _is_limited(record.name) else None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # The class of an exception from another process has the place where it was raised there.
    place = getattr(type(error), PLACE, "") or (trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno))
    return *call, type(error).__qualname__, str(place)


def _is_limited(name: str) -> bool:
    return f"{name}.".startswith(LIMITED_LOGGERS)


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _record(level: int, message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord(OWN_LOGGER, level, __file__, 0, message, arguments, None)


class _Unbuffered:
    """An unbuffered text stream: what cannot be written now is dropped, not written later."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._truncated = False  # Whether the last line was written in part.

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        left = memoryview(b"\n" + data if self._truncated else data)
        while left:
            written = os.write(self._file, left)
            left = left[written:]
            self._truncated = bool(left)
        return len(text)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        os.close(self._file)


class _LimitedHandler(logging.StreamHandler[TextIO]):
    """Limits repeats. Lines that cannot be written are dropped; the next successful write logs how many."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limiter = RepeatLimiter()
        self._lost, self._lost_reason = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        """See the base class."""
        try:
            records = self._limiter.limit(record)
        except Exception:  # The arguments do not fit the message.
            self.handleError(record)
        else:
            self._write(records)

    def _write(self, records: Sequence[logging.LogRecord]) -> None:
        for record in records:
            lost, self._lost = self._lost, 0
            if lost:
                text = "%d log lines were lost: %s"
                self._emit(_record(logging.WARNING, text, lost, self._lost_reason))
                if self._lost:
                    self._lost = lost + 1
                    continue
            self._emit(record)

    def _emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # A file that was renamed cannot be opened anew.
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name.
        """See the base class. Prints no traceback to standard error, as that may be what fails."""
        error = sys.exc_info()[1]
        self._lost += 1
        self._lost_reason = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """See the base class."""
        self.acquire()
        try:
            self._write(self._limiter.counts())
        finally:
            self.release()
        super().close()

    def _open(self) -> Any:
        """Open the file of a file handler."""
        file = cast("logging.FileHandler", self).baseFilename
        return _Unbuffered(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))


class LogStream(_LimitedHandler):
    """Writes to standard error."""

    def __init__(self) -> None:
        stream: Any = sys.stderr
        try:
            stream = _Unbuffered(stream.fileno())
        except (AttributeError, OSError):  # It was closed before the start, or has no file descriptor.
            stream = stream or _Unbuffered(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        super().__init__(stream)


class LogFile(_LimitedHandler, WatchedFileHandler):
    """Appends to a file, and opens it anew when it was renamed or removed. Raise `OSError` if it cannot."""

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, encoding="utf-8")


class DailyLogFile(_LimitedHandler, TimedRotatingFileHandler):
    """Appends to a file that is rotated at midnight; `backups` old ones are kept. Raise as `LogFile` does."""

    def __init__(self, file: Path, backups: int) -> None:
        super().__init__(file, when="midnight", backupCount=backups, encoding="utf-8")


def log_handler(file: str) -> logging.Handler:
    """Return the handler for the file, or for standard error if it is "". Raise `OSError`."""
    return LogFile(file) if file else LogStream()
