"""`RestartPolicy`, how lost processes are replaced, and `ProcessMonitor`, which starts and checks processes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from triglot.executors.process.health import BEAT_SECONDS

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays and timeouts of the processes of a model, in seconds.

    A lost process is replaced after `first_delay`; the delay doubles with each further loss, up to
    `longest_delay`, and starts again at `first_delay` after a process that lasted for `steady`. A replacement may
    take `load_timeout` to load, or ten times as long as the first process took if that is more. At shutdown each
    process has `end_timeout` to close its model, and then `kill_timeout` to end after SIGTERM.
    """

    first_delay: float = 0.1
    longest_delay: float = 30.0
    steady: float = 10.0
    load_timeout: float = 60.0
    end_timeout: float = 10.0
    kill_timeout: float = 1.0


DEFAULT_POLICY = RestartPolicy()


class ProcessMonitor:
    """A thread that periodically calls every function in `checks()`, and runs the functions given to `do`.

    Processes that it starts are ended by the system when this thread ends, where the system supports that. So it
    keeps running whatever fails; of failures in a row only the first is logged.
    """

    def __init__(self, name: str, checks: Callable[[], Iterable[Callable[[], object]]]) -> None:
        self._checks = checks
        self._failing = False
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                self._check()
            else:
                if order is None:
                    return
                order()

    def _check(self) -> None:
        failed = False
        try:
            for check in self._checks():
                try:
                    check()
                except BaseException:
                    failed = True
                    self._log_failure()
        except BaseException:
            failed = True
            self._log_failure()
        self._failing = failed

    def _log_failure(self) -> None:
        if not self._failing:
            log.exception("%s: a check failed; the next checks follow", self._thread.name)

    def do(self, work: Callable[[], T]) -> T:
        """Run `work` on the monitor's thread; returns or raises what it returns or raises. Blocks.

        Called on other threads. Raises `OSError` after `end`.
        """
        done: Future[T] = Future()

        def order() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._orders.put(order)
        while not wait([done], 10 * BEAT_SECONDS).done:
            if not self._thread.is_alive():
                raise OSError("the thread that watches processes has ended")
        return done.result()

    def end(self) -> None:
        """End the thread, and wait until it has ended."""
        self._orders.put(None)
        self._thread.join()
