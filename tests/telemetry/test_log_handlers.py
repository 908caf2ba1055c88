"""What writes the log: one line a record, limited repeats, and a disk that takes nothing for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from triglot.telemetry.log_handlers import (
    MAX_LINE,
    MAX_LINES,
    MAX_TRACE,
    WINDOW_SECONDS,
    LineFormatter,
    LogFile,
    RepeatLimiter,
    escaped,
)

CLIENTS = "triglot.transports.http2"
"""A logger whose lines clients can cause."""
OTHER = "triglot.repository.manager.manager"


class Undescribed(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise SystemExit(3)


class Log:
    """A file's handler, on a logger of its own below `above`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.handler = LogFile(file)
        self.handler.setFormatter(LineFormatter("%(levelname).1s %(message)s"))
        self.seconds = 0.0
        self.handler._limiter = RepeatLimiter(lambda: self.seconds)

    def log_line(self, name: str, text: str, *arguments: object, error: BaseException | None = None) -> None:
        record = logging.LogRecord(name, logging.INFO, __file__, 1, text, arguments, None)
        if error is not None:
            record.exc_info = (type(error), error, error.__traceback__)
        self.handler.handle(record)

    def lines(self) -> list[str]:
        return self.file.read_text().splitlines()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "log")
    yield log
    log.handler.close()


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


# --- one line ---


@pytest.mark.parametrize(
    "bad", ["\n", "\r", "\x1b[2J", "\x00", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e"]
)
def test_what_is_not_printable_is_escaped(log: Log, bad: str) -> None:
    log.log_line(OTHER, "one%sI forged", bad)
    log.log_line(OTHER, "failed", error=raised(ValueError(f"one{bad}I forged")))
    shown = ascii(bad)[1:-1]
    first, *rest = log.lines()
    assert first == f"I one{shown}I forged"
    assert rest[0] == "I failed"
    # A traceback may have several lines, none of which begins as those of the log do.
    assert [line[:2] for line in rest[1:]] == ["  "] * len(rest[1:])
    assert all(character.isprintable() for character in "".join(rest))


@pytest.mark.parametrize("text", ["", "plain", "ünïcödé ✗ 漢字", "a\\nb"])
def test_what_is_printable_stays(text: str) -> None:
    assert escaped(text) == text


def test_a_surrogate_is_escaped(log: Log) -> None:
    log.log_line(OTHER, "a %s", "\ud800")
    assert log.lines() == ["I a \\ud800"]


def test_long_lines_and_tracebacks_are_cut(log: Log) -> None:
    log.log_line(OTHER, "%s", "x" * 10_000_000)
    (line,) = log.lines()
    assert line == f"I {'x' * MAX_LINE}... (10000000 characters)"
    log.log_line(OTHER, "failed", error=raised(ValueError("y" * 10_000_000 + "the end")))
    _, *rest = log.lines()[1:]
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-1].endswith("the end")
    assert sum(map(len, rest)) < MAX_TRACE + 200


def test_an_exception_that_cannot_be_described(log: Log) -> None:
    log.log_line(OTHER, "failed", error=raised(Undescribed()))
    assert log.lines() == ["I failed", "  Undescribed: <no traceback: SystemExit>"]


# --- repeats ---


def test_lines_that_clients_cause_are_limited_and_counted(log: Log) -> None:
    for number in range(1000):
        log.log_line(CLIENTS, "a connection ends: %d", number)
    assert log.lines() == [f"I a connection ends: {number}" for number in range(MAX_LINES)]
    log.seconds = WINDOW_SECONDS
    log.log_line(OTHER, "something else")
    assert log.lines()[MAX_LINES:] == [
        f"I {1000 - MAX_LINES} similar lines in the last minute not logged: a connection ends: 0",
        "I something else",
    ]


def test_other_lines_are_not_limited(log: Log) -> None:
    for name in (OTHER, "their.own", "triglot.models", "triglot.access", "root"):
        for number in range(3 * MAX_LINES):
            log.log_line(name, "loaded %d", number)
    assert len(log.lines()) == 5 * 3 * MAX_LINES


def test_one_traceback_a_minute_for_each_kind(log: Log) -> None:
    def fail(kind: int) -> BaseException:
        if kind == 0:
            return raised(ValueError("here"))
        return raised(TypeError("here")) if kind == 1 else raised_in_module()

    def raised_in_module() -> BaseException:
        try:
            raise ValueError("there")
        except ValueError as error:
            return error

    for minute in range(2):
        log.seconds = minute * WINDOW_SECONDS
        for number in range(100):
            log.log_line(CLIENTS, "m failed, error %d", number, error=fail(number % 4 % 3))
    text = "\n".join(log.lines())
    assert text.count("Traceback (most recent call last):") == 2 * 3
    assert text.count("I m failed, error 5: TypeError: here") == 2
    # Of 50, 25 and 25 calls.
    assert text.count(f"I 49 similar errors in the last minute, {50 - MAX_LINES} of them not logged") == 1
    assert text.count(f"I 24 similar errors in the last minute, {25 - MAX_LINES} of them not logged") == 2


def test_what_is_left_out_is_counted_at_the_end_too(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    for _ in range(MAX_LINES + 3):
        log.log_line(CLIENTS, "a connection ends")
    log.handler.close()
    assert log.lines()[-1] == "I 3 similar lines in the last minute not logged: a connection ends"


# --- a full disk ---


def test_nothing_can_be_written(capfd: pytest.CaptureFixture[str]) -> None:
    log = Log(Path("/dev/full"))
    for number in range(100):
        log.log_line(OTHER, "line %d", number)
    log.handler.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [OTHER, CLIENTS])
def test_a_line_whose_arguments_do_not_fit_is_counted(
    log: Log, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    log.log_line(name, "%d", "no number")
    log.log_line(OTHER, "next")
    lost, following = log.lines()
    assert lost.startswith("W 1 log lines were lost: TypeError: %d format")
    assert following == "I next"
    assert capfd.readouterr() == ("", "")


def test_a_removed_file_is_made_anew(log: Log) -> None:
    log.log_line(OTHER, "before")
    log.file.unlink()
    log.log_line(OTHER, "after")
    assert log.lines() == ["I after"]


def test_lines_are_counted_while_the_file_cannot_be_made(log: Log, capfd: pytest.CaptureFixture[str]) -> None:
    log.file.unlink()
    log.file.mkdir()
    for number in range(3):
        log.log_line(OTHER, "line %d", number)
    log.file.rmdir()
    log.log_line(OTHER, "next")
    lost, following = log.lines()
    assert lost.startswith("W 3 log lines were lost: IsADirectoryError: ")
    assert following == "I next"
    assert capfd.readouterr() == ("", "")
