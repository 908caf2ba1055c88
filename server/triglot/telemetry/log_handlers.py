"""What writes the log, whoever logs: one line for a record, of bounded length and number, whatever the disk does.

Clients and models have a say in what is logged, so here, and not at each call, control characters are escaped,
long texts cut, and lines that repeat limited: of each kind `LINES` a minute, and one traceback. The place of the
logging call, and the type and the place of its exception make a kind. What is left out is counted, and the count
logged with the first record after that minute.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any, TextIO, cast

from triglot.core.errors import text_of
from triglot.telemetry.loggers import OURS

MAX_LINE = 4096
"""Characters of a message."""
MAX_TRACE = 16 * 1024
"""Characters of a traceback."""
LINES = 20
WINDOW_SECONDS = 60.0
LIMITED = (
    *(f"{OURS}.{name}." for name in ("backends", "binding", "core", "dataplane", "engine", "model_calls")),
    *(f"{OURS}.{name}." for name in ("protocols", "transports")),
    "aiohttp.",
    "asyncio.",
    "grpc.",
)
"""Loggers, with those below them, whose lines clients can cause; of others only tracebacks are limited."""
PLACE = "raised_at"
"""What a class of exceptions calls the place of those that were raised elsewhere."""
IN_GENERAL = f"{OURS}.log"
"""The logger of what the log says of itself, which is about no request."""
SAMPLE = 200
"""Characters of a message that stands for all of its kind."""


def escaped(text: str) -> str:
    """The text with what is not printable escaped, as `repr` does."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class LineFormatter(logging.Formatter):
    """One line for a record; a traceback follows, indented, so that no text in it passes for a line of the log."""

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
    """The record's message, cut."""
    message = record.getMessage()
    return message if len(message) <= MAX_LINE else f"{message[:MAX_LINE]}... ({len(message)} characters)"


def traceback_of(formatter: logging.Formatter, exc_info: Any) -> str:
    """The traceback as the formatter writes it, cut."""
    try:
        return stack_of(formatter.formatException(exc_info))
    except BaseException as error:  # The exception's class may have code of its own for its causes.
        return f"{exc_info[0].__name__}: <no traceback: {type(error).__name__}>"


def stack_of(text: str) -> str:
    """A traceback, or a stack, cut: where it began, and what it came to."""
    if len(text) <= MAX_TRACE:
        return text
    left_out = f"\n... ({len(text) - MAX_TRACE} characters omitted)\n"
    return text[: MAX_TRACE // 4] + left_out + text[-MAX_TRACE * 3 // 4 :]


def _indented(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield f"  {escaped(line)}"


@dataclass(slots=True)
class _Kind:
    """What came of one kind within the minute. `sample`: the first message."""

    sample: str
    level: int
    lines: int = 0
    left_out: int = 0
    traces_left_out: int = 0


class Repeats:
    """Limits lines that repeat."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[object, _Kind] = {}
        self._until = 0.0

    def reduced(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """What is to be logged now: the record, perhaps without its traceback, and counts of what was left out."""
        now = self._clock()
        records = self.counts() if now >= self._until else []
        key = _key(record)
        if key is None:
            return [*records, record]
        if not self._kinds:
            self._until = now + WINDOW_SECONDS
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(record.getMessage()[:SAMPLE], record.levelno)
        if kind.lines >= LINES and _is_limited(record.name):
            kind.left_out += 1
            return records
        kind.lines += 1
        error = _error(record)
        if error is not None and kind.lines > 1:
            kind.traces_left_out += 1
            message = record.getMessage()
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
            record.msg, record.args = "%s: %s: %s", (message, type(error).__name__, text_of(error))
        return [*records, record]

    def counts(self) -> list[logging.LogRecord]:
        """How many were left out since the last time, by kind."""
        kinds, self._kinds = self._kinds, {}
        return [_count(kind) for kind in kinds.values() if kind.left_out or kind.traces_left_out]


def _count(kind: _Kind) -> logging.LogRecord:
    if kind.traces_left_out:
        text = "%d similar errors in the last minute, %d of them not logged, the others without a traceback: %s"
        return _record(kind.level, text, kind.traces_left_out + kind.left_out, kind.left_out, kind.sample)
    return _record(kind.level, "%d similar lines in the last minute not logged: %s", kind.left_out, kind.sample)


def _key(record: logging.LogRecord) -> object:
    """What makes records one kind; None where they are not limited."""
    call = record.name, record.pathname, record.lineno
    error = _error(record)
    if error is None:
        return call if _is_limited(record.name) else None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # One that comes from a process was raised there.
    place = getattr(type(error), PLACE, "") or (trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno))
    return *call, type(error).__qualname__, str(place)


def _is_limited(name: str) -> bool:
    return f"{name}.".startswith(LIMITED)


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _record(level: int, message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord(IN_GENERAL, level, __file__, 0, message, arguments, None)


class _Unbuffered:
    """A text stream that keeps nothing: what cannot be written now is not written later, either."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._torn = False  # The last line was written in part.

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        left = memoryview(b"\n" + data if self._torn else data)
        while left:
            written = os.write(self._file, left)
            left = left[written:]
            self._torn = bool(left)
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        os.close(self._file)


class _Careful(logging.StreamHandler[TextIO]):
    """Limits what repeats. Lines that cannot be written are lost; once others can, it says how many."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._repeats = Repeats()
        self._lost, self._why = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        """See the base class."""
        try:
            records = self._repeats.reduced(record)
        except Exception:  # Arguments that do not fit the message.
            self.handleError(record)
        else:
            self._write(records)

    def _write(self, records: Sequence[logging.LogRecord]) -> None:
        for record in records:
            lost, self._lost = self._lost, 0
            if lost:
                text = "%d log lines were lost: %s"
                super().emit(_record(logging.WARNING, text, lost, self._why))
                if self._lost:
                    self._lost = lost + 1
                    continue
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name.
        """See the base class. Never a traceback on standard error: that may be what fails."""
        error = sys.exc_info()[1]
        self._lost += 1
        self._why = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """See the base class."""
        self.acquire()
        try:
            self._write(self._repeats.counts())
        finally:
            self.release()
        super().close()

    def _open(self) -> Any:
        """For handlers of files."""
        file = cast("logging.FileHandler", self).baseFilename
        return _Unbuffered(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))


class LogStream(_Careful):
    """Writes to standard error."""

    def __init__(self) -> None:
        stream: Any = sys.stderr
        try:
            stream = _Unbuffered(stream.fileno())
        except (AttributeError, OSError):  # It was closed before the start, or is none of the system's.
            stream = stream or _Unbuffered(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        super().__init__(stream)


class LogFile(_Careful, logging.FileHandler):
    """Adds to a file. Raises `OSError` for one that cannot be opened."""

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, encoding="utf-8")


class DailyLogFile(_Careful, TimedRotatingFileHandler):
    """Adds to a file that is put aside at midnight; `backups` old ones are kept. Raises as `LogFile`."""

    def __init__(self, file: Path, backups: int) -> None:
        super().__init__(file, when="midnight", backupCount=backups, encoding="utf-8")


def log_handler(file: str) -> logging.Handler:
    """What writes to the file, or to standard error where it is "". Raises `OSError`."""
    return LogFile(file) if file else LogStream()
