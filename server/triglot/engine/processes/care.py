"""How processes are looked after, and the thread that does it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from triglot.engine.processes.health import BEAT_SECONDS
from triglot.engine.processes.process import Process

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Care:
    """How processes are looked after; all in seconds.

    A process is replaced after `first_delay`, after twice as much when that is lost, too, and so on up to
    `longest_delay`; one that has lasted for `steady` is no reason to wait longer. A replacement may take
    `load_patience`, or ten times as long as the first process if that is more. In the end each has `end_patience`
    to close its model, and then `more_patience` to heed SIGTERM.
    """

    first_delay: float = 0.1
    longest_delay: float = 30.0
    steady: float = 10.0
    load_patience: float = 60.0
    end_patience: float = 10.0
    more_patience: float = 1.0


CARE = Care()


@dataclass(slots=True, eq=False)
class Place:
    """Where there is a process, or will be one: `coming` is loading, `due` is when the next one is started."""

    number: int
    process: Process | None = None
    coming: Process | None = None
    begun: float = 0.0
    due: float = 0.0
    lost_in_a_row: int = 0

    def put_off(self, care: Care) -> float:
        """Seconds until the next one is started."""
        delay = min(care.first_delay * 2.0 ** min(self.lost_in_a_row, 60), care.longest_delay)
        self.lost_in_a_row += 1
        self.due = time.monotonic() + delay
        return delay


def look_at(process: Process, hang_seconds: float, longest_run: float) -> None:
    """At one that is called: end it if it hangs, tell it who has left."""
    if why := process.ended():
        process.kill(why)
        return
    process.pulse.look()
    if why := _why_hung(process, hang_seconds, longest_run):
        process.hung = True
        process.kill(why)
    process.tell_cancelled()
    process.keep_up()


def _why_hung(process: Process, hang_seconds: float, longest_run: float) -> str:
    """Why it is to be killed; "" for a process that is not taken for hung."""
    if 0 < hang_seconds <= process.pulse.silence:
        return f"gave no sign of life for {process.pulse.silence:.1f} s and was killed"
    if 0 < longest_run < process.run_seconds:
        return f"ran it longer than longest_run ({longest_run:g} s) and was killed"
    return ""


def look_at_coming(process: Process, age: float, care: Care, usual: float) -> None:
    """At one that loads its model, since `age` seconds; `usual`: what the first one took, 0: it is the first."""
    if why := process.ended():
        process.kill(why)
    elif usual and age > max(care.load_patience, 10 * usual):
        process.kill(f"did not load its model within {age:.0f} s and was killed")
    else:
        process.say_what_is_logged()


class Keeper:
    """A thread that calls what `looks` gives again and again, and does what it is told in between.

    Processes that are started there end with it, at the latest, where the system can do that. So it goes on
    whatever fails; of failures in a row the first is logged.
    """

    def __init__(self, name: str, looks: Callable[[], Iterable[Callable[[], object]]]) -> None:
        self._looks = looks
        self._failing = False
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                self._look_around()
            else:
                if order is None:
                    return
                order()

    def _look_around(self) -> None:
        failed = False
        try:
            for look in self._looks():
                try:
                    look()
                except BaseException:
                    failed = True
                    self._log_failure()
        except BaseException:
            failed = True
            self._log_failure()
        self._failing = failed

    def _log_failure(self) -> None:
        if not self._failing:
            log.exception("%s: a look has failed; there will be others", self._thread.name)

    def do(self, work: Callable[[], T]) -> T:
        """On another thread: what `work` gives or raises there. Raises `OSError` after `end`."""
        done: Future[T] = Future()

        def order() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._orders.put(order)
        while not wait([done], 10 * BEAT_SECONDS).done:
            if not self._thread.is_alive():
                raise OSError("the thread that looks after processes has ended")
        return done.result()

    def end(self) -> None:
        """Wait for its end."""
        self._orders.put(None)
        self._thread.join()
