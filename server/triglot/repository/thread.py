"""Blocking work that may never end, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def _forget(_: object) -> None:
    pass


async def in_thread(work: Callable[[], T], late: Callable[[T], object] = _forget) -> T:
    """What `work` returns or raises; when nobody waits for it any more, `late` gets it, on the thread.

    A daemon thread, not one of the loop's pool: work that never ends must not keep a stopped server alive.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            # A future that nobody cancelled is claimed, and cannot be cancelled between this line and the next.
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        else:
            if done.set_running_or_notify_cancel():
                done.set_result(result)
            else:
                late(result)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
