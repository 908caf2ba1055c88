"""Runs blocking work that may never end on its own daemon thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from triglot.core.errors import DeadlineExceeded

T = TypeVar("T")
log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0
"""Seconds after which abandoned work is logged: it takes a CPU, or memory."""


def _forget(_: object) -> None:
    pass


async def in_thread(work: Callable[[], T], late: Callable[[T], object] = _forget, name: str = "") -> T:
    """Return or raises what `work` does; if this is cancelled, `late` gets the result, on a thread.

    Uses a daemon thread, not the loop's pool: work that never ends must not keep a stopped server alive, nor take
    a thread from others. It cannot be ended: if it continues after a cancellation, that is logged by its `name`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    finished, reported = threading.Event(), threading.Event()

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
            finished.set()
            _notify(loop, partial(fail, error))
        else:
            finished.set()
            if done.cancelled() or not _notify(loop, partial(deliver, result)):
                late(result)
        if reported.is_set():
            log.info("%s has ended", name)

    def report() -> None:
        if not finished.is_set():
            reported.set()
            log.warning("%s still runs on its thread, which cannot be ended; nothing waits for it", name)

    _start(run)
    try:
        return await done
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:
            # The result arrived in the same loop iteration as the cancellation.
            _start(partial(late, done.result()))
        elif name:
            loop.call_later(PATIENCE_SECONDS, report)
        raise


async def in_time(work: Callable[[], T], seconds: float, name: str) -> T:
    """As `in_thread`, for at most `seconds` of the option load_timeout; 0: no limit.

    Raise `DeadlineExceeded`; the work continues.
    """
    try:
        async with asyncio.timeout(seconds or None) as limit:
            return await in_thread(work, name=name)
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"{name} took longer than load_timeout, {seconds:g} s") from None


def _start(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _notify(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> bool:
    """Schedules the callback on the loop; returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        return False
    return True
