"""Which models are loading, and since when: in a line below the log on a terminal, else in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from triglot.repository.manager.plan import State
from triglot.repository.manager.registry import Registry
from triglot.telemetry.log_handlers import LogStream

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.2
LOG_SECONDS = 30.0
"""Seconds between two lines in the log."""
CLEAR = "\r\x1b[K"


@contextmanager
def load_progress(handler: logging.Handler, registry: Registry) -> Iterator[None]:
    """Show which versions of the registry are loading, during the block."""
    if not (isinstance(handler, LogStream) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"):
        showing = asyncio.create_task(_show(registry, LOG_SECONDS, _log))
        try:
            yield
        finally:
            showing.cancel()
        return
    line: Any = _Line(handler.stream)
    handler.setStream(line)
    showing = asyncio.create_task(_show(registry, INTERVAL_SECONDS, partial(_draw, handler, line)))
    try:
        yield
    finally:
        showing.cancel()
        _draw(handler, line, "")
        handler.setStream(line.stream)


async def _show(registry: Registry, interval: float, show: Callable[[str], object]) -> None:
    began: dict[str, float] = {}
    start = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, versions = time.monotonic(), list(registry.versions())
        loading = [str(version.files) for version in versions if version.state is State.LOADING]
        began = {name: began.get(name, max(start, now - interval)) for name in loading}
        ready = sum(version.state is State.READY for version in versions)
        texts = [f"{name} ({now - since:.0f} s)" for name, since in began.items()]
        show(f"{ready} of {len(versions)} loaded; loading {', '.join(texts)}" if texts else "")


def _log(text: str) -> None:
    if text:
        log.info("%s", text)


def _draw(handler: LogStream, line: _Line, text: str) -> None:
    handler.acquire()  # Other threads may log.
    try:
        line.text = text[: shutil.get_terminal_size().columns - 1]
        line.write("")
    finally:
        handler.release()


class _Line:
    """A stream of lines, with a text below them that is overwritten."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.text = ""

    def write(self, lines: str) -> int:
        """Write lines above the text."""
        self.stream.write(f"{CLEAR}{lines}{self.text}")
        return len(lines)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()
