"""The readiness check that a model may define itself."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0


class Readiness:
    """Runs `check` on a thread; concurrent callers share one run. On the event loop.

    A check that takes longer than `seconds` counts as not ready; its thread is not stopped.
    """

    def __init__(self, name: str, check: Callable[[], bool], seconds: float = CHECK_SECONDS) -> None:
        self._name = name
        self._check = check
        self._seconds = seconds
        self._running: asyncio.Future[bool] | None = None

    async def ask(self) -> bool:
        """Return whether the check passes."""
        if self._running is None:
            loop = asyncio.get_running_loop()
            self._running = loop.create_future()
            # A daemon: a check that never returns must not keep a stopped server alive.
            threading.Thread(target=self._run, args=(loop,), name=f"{self._name} ready", daemon=True).start()
        running = self._running
        await asyncio.wait([running], timeout=self._seconds)
        if not running.done():
            log.warning("%s: the readiness check takes longer than %g s", self._name, self._seconds)
        return running.done() and running.result()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        ready = False
        try:
            ready = self._check()
        except BaseException:  # A model that calls exit() is not ready either.
            log.exception("%s: the readiness check failed", self._name)
        with suppress(RuntimeError):  # The server has stopped.
            loop.call_soon_threadsafe(self._on_end, ready)

    def _on_end(self, ready: bool) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.set_result(ready)
