"""What is told of looks at the disk: each text once, and again when it comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from triglot.repository.scan.scanner import AtOnce, Scan
from triglot.repository.scan.source import NothingFound

log = logging.getLogger(__name__)


class OnceLogger:
    """Logs what looks find odd or wrong.

    Of what is taken at once, it does so at once. Of all else, when two looks in a row have found the same: a
    folder that is just being made is neither odd nor wrong.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._seen: set[str] = set()

    def log(self, look: Scan, at_once: AtOnce, *, others: bool = True, elsewhere: str = "") -> None:
        """`others`: tell also of what is not taken at once. `elsewhere`: what somebody else tells."""
        seen = set()
        for key, level, text in _texts(look):
            seen.add(text)
            if text in self._logged or not (at_once(Path(key).name) or (others and text in self._seen)):
                continue
            self._logged.add(text)
            if text not in elsewhere:
                log.log(level, "%s", text)
        self._seen = seen
        self._logged &= seen


def _texts(look: Scan) -> Iterator[tuple[str, int, str]]:
    """The model's name or the path, how bad it is, and what to say."""
    for key, texts in look.warnings.items():
        yield from ((key, logging.WARNING, text) for text in texts)
    for key, problem in look.problems.items():
        level = logging.WARNING if isinstance(problem, NothingFound) else logging.ERROR
        yield key, level, str(problem)
