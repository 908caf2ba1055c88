"""In the process: the event loop of `async def` code, which runs on between the calls, as it has in the server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn

from triglot.core.errors import Cancelled

log = logging.getLogger(__name__)


class Running:
    """Code that runs on the loop; what comes of it is `done`, whatever it raises."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: Future[Any] = Future()
        self.done.set_running_or_notify_cancel()
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._told = False

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """On the loop."""
        try:
            self._task = self._loop.create_task(work)
            self._task.add_done_callback(self._hand_over)
        except BaseException as error:  # Of the model's own task factory.
            work.close()
            self.done.set_exception(error)

    def cancel(self) -> None:
        """On any thread: nobody waits for it any more."""
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _hand_over(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self._told:
            error = Cancelled("the call was cancelled while the model ran")
        else:
            error = asyncio.CancelledError()  # Its own.
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())


class OwnLoop:
    """A loop on a thread of its own, from its first use on. `lost` is called when it cannot go on."""

    def __init__(self, name: str, lost: Callable[[], NoReturn]) -> None:
        self._name = name
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, work: Coroutine[Any, Any, Any]) -> Running:
        """Have it run."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="loop", daemon=True).start()
        running = Running(self._loop)
        self._loop.call_soon_threadsafe(running.begin, work)
        return running

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """As long as the process lives: a call would wait for ever for a loop that has ended."""
        while not loop.is_closed():
            try:
                loop.run_forever()  # Until code calls exit(), or stops the loop.
            except (SystemExit, KeyboardInterrupt) as error:
                log.error("%s: its code has raised %s; its loop goes on", self._name, type(error).__name__)
            except BaseException:
                log.exception("%s: its loop has failed", self._name)
                break
        self._lost()
