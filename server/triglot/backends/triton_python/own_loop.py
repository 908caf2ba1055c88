"""The event loop of an instance, for an `execute` that is `async def`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class OwnLoop:
    """Runs on a thread until `end`, whatever the code on it does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._ended = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """What comes of it; cancelled at the end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Cancel what still runs."""
        self._ended = True
        with suppress(RuntimeError):  # Code has closed it.
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            while not self._ended:
                self._run_on()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()

    def _run_on(self) -> None:
        """Until something stops it."""
        what = "stopped its event loop"
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # A task of the model's own may have called exit().
            what = f"raised {type(error).__name__} in its event loop"
        if not self._ended:
            log.error("%s: the model's code %s; the loop continues", self._name, what)
