"""The log files of a grps project: one for the server, one for the project's own code (grps 7)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from triglot.backends.grps.server_settings import ServerSettings
from triglot.core.errors import ModelLoadError
from triglot.telemetry.log_handlers import DailyLogFile, LineFormatter

SERVER_LOGGER = "grps.server"
"""The logger that the project's code knows as `logger`; it writes to the server's file."""
USER_LOGGER = "grps.user"
"""The logger that the project's code knows as `clogger`."""
SERVER_FILE = "grps_server.log"
USER_FILE = "grps_usr.log"
MONITOR_FILE = "grps_monitor.log"
LINE = "{asctime} {threadName} {filename}:{lineno} {levelname}] {message}"


class _Formatter(LineFormatter):
    default_time_format = "%Y%m%d %H:%M:%S"
    default_msec_format = "%s.%03d"


def log_folder(folder: Path, settings: ServerSettings) -> Path:
    """Return the folder of a project's logs, creating it if needed. Raise `ModelLoadError`."""
    path = folder / settings.log_dir
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelLoadError(f"log.log_dir: {path} cannot be made: {error.strerror}") from None
    return path


def own_name(file: str, worker: int) -> str:
    """Return a worker's name of a file: several workers cannot rotate or rewrite the same one."""
    return file if worker == 1 else file.replace(".", f"-worker{worker}.", 1)


@contextmanager
def log_files(folder: Path, settings: ServerSettings, worker: int = 1) -> Iterator[Path]:
    """Copy all log records to the project's files until the block ends; yield their folder.

    Records of the project's own logger go to the user's file, all others to the server's. Files are rotated at
    midnight; `log_backup_count` old ones are kept. Each `worker` has files of its own.
    Raise `ModelLoadError` if they cannot be written.
    """
    path, count = log_folder(folder, settings), settings.log_backup_count
    with ExitStack() as stack:
        try:
            server_file, user_file = (path / own_name(file, worker) for file in (SERVER_FILE, USER_FILE))
            server = stack.enter_context(_attached(logging.getLogger(), server_file, count))
            stack.enter_context(_attached(logging.getLogger(USER_LOGGER), user_file, count))
        except OSError as error:
            raise ModelLoadError(f"log.log_dir: {error.filename} cannot be written: {error.strerror}") from None
        server.addFilter(lambda record: record.name != USER_LOGGER)
        yield path


@contextmanager
def _attached(logger: logging.Logger, file: Path, backups: int) -> Iterator[logging.Handler]:
    handler = DailyLogFile(file, backups)
    handler.setFormatter(_Formatter(LINE, style="{"))
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        handler.close()
