"""Blocking work that may never end, off the event loop."""

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
    """What `work` returns or raises; when nobody waits for it any more, `late` gets it, on a thread.

    A daemon thread, not one of the loop's pool: work that never ends must not keep a stopped server alive.
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
            # It came in the very turn of the loop that cancelled this.
            _start(partial(late, done.result()))
        raise


def _start(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _notify(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> bool:
    """Have the loop call it; False when the loop is closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        return False
    return True
