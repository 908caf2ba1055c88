"""The monitor log: a file that is rewritten each second with the values of the metrics (grps 7)."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class MonitorLog:
    """Writes the file, and logs a failure once until a write succeeds again."""

    def __init__(self) -> None:
        self._failing = False

    def write(self, file: Path, text: str) -> None:
        """Replaces the file atomically: a reader always sees all lines of one second."""
        new = file.with_name(file.name + ".new")
        try:
            new.write_text(text, encoding="utf-8", errors="replace")
            new.replace(file)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            if not self._failing:
                log.warning("cannot write metrics to %s: %s", file, error)
            self._failing = True
        else:
            self._failing = False
