"""Logs the messages of scans: each text once, and again when it reappears."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from triglot.repository.scan.scanner import Immediate, Scan
from triglot.repository.scan.source import NothingFound

log = logging.getLogger(__name__)


class OnceLogger:
    """Logs the warnings and errors of scans.

    Those of models that are loaded at once are logged at once; others only if two scans in a row find them: a
    folder that is just being created is no error.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._seen: set[str] = set()

    def log(self, scan: Scan, immediate: Immediate, *, others: bool = True, elsewhere: str = "") -> None:
        """Log a scan. `others`: also models that are not immediate. `elsewhere`: what is reported otherwise."""
        seen = set()
        for key, level, text in _texts(scan):
            seen.add(text)
            if text in self._logged or not (immediate(Path(key).name) or (others and text in self._seen)):
                continue
            self._logged.add(text)
            if text not in elsewhere:
                log.log(level, "%s", text)
        self._seen = seen
        self._logged &= seen


def _texts(scan: Scan) -> Iterator[tuple[str, int, str]]:
    """Yield the model's name or path, the log level, and the text."""
    for key, texts in scan.warnings.items():
        yield from ((key, logging.WARNING, text) for text in texts)
    for key, problem in scan.problems.items():
        level = logging.WARNING if isinstance(problem, NothingFound) else logging.ERROR
        yield key, level, str(problem)
