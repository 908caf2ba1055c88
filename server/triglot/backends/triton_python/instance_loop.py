"""The event loop of an instance, for an `async def execute`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class InstanceLoop:
    """Runs on a daemon thread until `stop`, even if the code on it stops the loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._ended = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine and return its future, which is cancelled at the end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the loop and cancel its coroutines."""
        self._ended = True
        with suppress(RuntimeError):  # The model's code closed the loop.
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            while not self._ended:
                self._run_until_stopped()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()

    def _run_until_stopped(self) -> None:
        """Run the loop until something stops it."""
        what = "stopped its event loop"
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # A task of the model's own may have called exit().
            what = f"raised {type(error).__name__} in its event loop"
        if not self._ended:
            log.error("%s: the model's code %s; the loop continues", self._name, what)
