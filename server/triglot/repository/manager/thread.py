"""Runs blocking work that may never end on its own daemon thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def _forget(_: object) -> None:
    pass


async def in_thread(work: Callable[[], T], late: Callable[[T], object] = _forget) -> T:
    """Returns or raises what `work` does; if this is cancelled, `late` gets the result, on a thread.

    Uses a daemon thread, not the loop's pool: work that never ends must not keep a stopped server alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T) -> None:
        if done.cancelled():
            _start(partial(late, result))
        else:
            done.set_result(result)

    def fail(error: BaseException) -> None:
        if not done.cancelled():
            done.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            _notify(loop, partial(fail, error))
        else:
            if done.cancelled() or not _notify(loop, partial(deliver, result)):
                late(result)

    _start(run)
    try:
        return await done
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:
            # The result arrived in the same loop iteration as the cancellation.
            _start(partial(late, done.result()))
        raise


def _start(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _notify(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> bool:
    """Schedules the callback on the loop; returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        return False
    return True
