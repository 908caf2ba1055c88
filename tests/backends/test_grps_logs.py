"""The log files of a grps project: which line goes where, and what it looks like."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path

import pytest

from tests.backends.grps_conf import SERVER, project
from triglot.backends.grps.logs import SERVER_FILE, SERVER_LOGGER, USER_FILE, USER_LOGGER, log_files
from triglot.backends.grps.server_settings import ServerSettings
from triglot.core.errors import ModelLoadError


def settings(folder: Path, log_dir: str = "./logs") -> ServerSettings:
    return project(folder, SERVER.replace("./logs", log_dir)).server


@contextmanager
def logging_at_info() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(before)


def test_lines_and_their_files(tmp_path: Path) -> None:
    def write_lines() -> None:
        logging.getLogger(SERVER_LOGGER).info("from the project's logger")
        logging.getLogger("triglot.server").critical("cannot start: %s", "no GPU ✗")
        logging.getLogger(USER_LOGGER).warning("from the project's clogger")
        logging.getLogger(USER_LOGGER).debug("too much")

    with logging_at_info(), log_files(tmp_path, settings(tmp_path)) as folder:
        thread = threading.Thread(target=write_lines, name="worker-3")
        thread.start()
        thread.join()
    assert folder == tmp_path / "logs"
    head = r"\d{8} \d\d:\d\d:\d\d\.\d{3} worker-3 test_grps_logs\.py:\d+ "
    first, second = (folder / SERVER_FILE).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(head + r"INFO\] from the project's logger", first)
    assert re.fullmatch(head + r"CRITICAL\] cannot start: no GPU ✗", second)
    (line,) = (folder / USER_FILE).read_text().splitlines()
    assert re.fullmatch(head + r"WARNING\] from the project's clogger", line)


def test_lines_are_appended_to_existing_files(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with log_files(tmp_path, settings(tmp_path)) as folder:
            logging.getLogger(USER_LOGGER).error(text)
    logging.getLogger(USER_LOGGER).error("after the end")
    assert [line.rpartition(" ")[2] for line in (folder / USER_FILE).read_text().splitlines()] == ["one", "two"]


def test_a_new_file_each_day(tmp_path: Path) -> None:
    with log_files(tmp_path, settings(tmp_path)) as folder:
        for day in range(1, 11):
            for handler in logging.getLogger(USER_LOGGER).handlers:
                if isinstance(handler, TimedRotatingFileHandler):
                    handler.rolloverAt = day * 86400  # A midnight of January 1970 has passed.
            logging.getLogger(USER_LOGGER).error("day %d", day)
    old = sorted(folder.glob(f"{USER_FILE}.1970-01-*"))
    texts = [path.read_text().rpartition("] ")[2] for path in [*old, folder / USER_FILE]]
    assert texts == [f"day {day}\n" for day in range(3, 11)]


def test_the_folder_may_lie_deep(tmp_path: Path) -> None:
    with log_files(tmp_path, settings(tmp_path, str(tmp_path / "var" / "log"))) as folder:
        assert folder == tmp_path / "var" / "log"
    assert (folder / SERVER_FILE).exists()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    read = settings(tmp_path, "logs/deep")
    (tmp_path / "logs").write_text("a file")
    with (
        pytest.raises(ModelLoadError, match=r"log\.log_dir: .*/logs/deep cannot be made: "),
        log_files(tmp_path, read),
    ):
        pass
    (tmp_path / "logs").unlink()
    (tmp_path / "logs" / "deep" / USER_FILE).mkdir(parents=True)
    with pytest.raises(ModelLoadError, match=rf"{USER_FILE} cannot be written: "), log_files(tmp_path, read):
        pass
