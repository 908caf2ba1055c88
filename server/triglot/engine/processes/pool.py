"""The processes of a model: who runs the next call, and what becomes of one that is lost.

Strategy: a thread of the pool's own starts all of them, so that the system can end them with it, and looks after
them: a process that has ended or hangs is given up at once, and replaced after a delay that grows while these
last only for a short time. Whoever has a call borrows a process that is free, and waits while there is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import ModelLoadError, Unavailable
from triglot.core.readings import Reading
from triglot.engine.processes.care import CARE, Care, Keeper, Place, look_at, look_at_coming
from triglot.engine.processes.health import BEAT_SECONDS
from triglot.engine.processes.loan import Loan
from triglot.engine.processes.notices import PoolMetrics
from triglot.engine.processes.process import Process, Program
from triglot.engine.processes.seats import Seats
from triglot.engine.work import reason_to_skip

log = logging.getLogger(__name__)


class Pool:
    """The processes of one model. `changed` is called, on any thread, when the model becomes alive or not."""

    def __init__(self, program: Program, care: Care = CARE) -> None:
        self.program = program
        self.changed: Callable[[], object] = lambda: None
        self.warm: Callable[[Process], object] = lambda _: None
        """Runs on each process that replaces another, before it is called. What it raises is a failure to load."""
        self.on_lost: Callable[[int], object] = lambda _: None
        """Is told, on any thread, the number of a process before another takes its place."""
        self.hang_seconds = self.longest_run = 0.0
        self.sticky = False
        """Whether each thread that calls has a process of its own."""
        self._care = care
        self._places: list[Place] = []
        self._free = threading.Condition()
        self.live = 0  # How many there are.
        self._failure = ""
        self._restarts = {"ended": 0, "hung": 0}
        self._load_seconds = 0.0
        self._closed = False
        self._gone: list[Process] = []
        self.seats = Seats()
        self.metrics = PoolMetrics(lambda: [process.notices for process in self.there()])
        self._keeper = Keeper(f"{program.name} processes", self._looks)

    # --- the beginning ---

    def open(self) -> dict[str, Any]:
        """What the model declares, once a first process has loaded it. Raises `ModelLoadError`."""
        begun = time.monotonic()
        place = Place(0)
        with self._free:
            self._places.append(place)
        declared = self._fill(place)
        self._load_seconds = time.monotonic() - begun
        return declared

    def grow(self, count: int) -> None:
        """Have `count` processes in all, once they are loaded. Raises `ModelLoadError`."""
        with self._free:
            more = [Place(number) for number in range(len(self._places), count)]
            self._places += more
        errors: list[Exception] = []

        def fill(place: Place) -> None:
            try:
                self._fill(place)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=fill, args=(place,), daemon=True) for place in more]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _fill(self, place: Place) -> dict[str, Any]:
        """Not on the keeper's thread: start a process there and load the model."""
        try:
            process = self._keeper.do(partial(self._start, place))
        except OSError as error:
            raise ModelLoadError(f"{self.program.file}: no process could be started: {error}") from error
        return self._loaded(place, process)

    def _start(self, place: Place) -> Process:
        """On the keeper's thread."""
        if self._closed:
            raise OSError("the model was given up")
        process = Process.start(self.program, place.number, self.metrics.apply)
        with self._free:
            place.coming, place.begun = process, time.monotonic()
        if bool(self._closed):  # By now.
            process.kill("was given up")
        return process

    def _loaded(
        self, place: Place, process: Process, warm: Callable[[Process], object] = lambda _: None
    ) -> dict[str, Any]:
        try:
            declared = process.load(self.program)
            warm(process)
        except BaseException:
            self._give_back(place, process)
            raise
        with self._free:
            place.coming = None
            if process.lost:
                self._gone.append(process)
                raise ModelLoadError(f"{self.program.file}: its process {process.lost}")
            place.process, place.begun = process, time.monotonic()
            self.live += 1
            self._failure = ""
            self._free.notify_all()
            first = self.live == 1
        if first:
            self.changed()
        return declared

    def _give_back(self, place: Place, process: Process) -> None:
        process.kill("could not load its model")
        with self._free:
            place.coming = None
            self._gone.append(process)

    # --- calls ---

    def borrowed(self, call: Call) -> Loan:
        """A process for this call; raises as `lend`."""
        return Loan(self, call)

    def lend(self, call: Call) -> Process:
        """A process for this call, waiting for one; `take_back` follows.

        Raises `Unavailable` when there is none, and will be none soon, and `ServingError` for a call that nobody
        waits for any more.
        """
        try:
            return self._borrow(call)
        except BaseException:
            # Nor has a sequence begun that this was the first call of.
            self.on_lost(self.seats.number(len(self._places)))
            raise

    def take_back(self, process: Process) -> None:
        """The call has ended."""
        if process.lost:
            self.lose(process)
        with self._free:
            process.borrowed = False
            self._free.notify_all()

    def _borrow(self, call: Call) -> Process:
        with self._free:
            if self.sticky and self.seats.is_stale:
                raise Unavailable(f"{self.program.name}: the process that was to run the request was lost")
            process = self._free_one()
            if process is None:
                since = time.perf_counter()
                while process is None:
                    self._check(call)
                    # Nobody says when a call is cancelled.
                    self._free.wait(BEAT_SECONDS)
                    process = self._free_one()
                for member in call.members:
                    member.waited(since)
            process.borrowed = True
            return process

    def shared(self, call: Call) -> Process | None:
        """On the loop: of the processes that run many calls the one with the fewest; None while there is none.

        Raises as `borrowed`.
        """
        with self._free:
            there = [place.process for place in self._places if place.process is not None]
            found = min((one for one in there if not one.lost), key=lambda one: one.count, default=None)
            if found is None:
                self._check(call)
            return found

    def unstarted(self) -> Process | None:
        """On any thread: one that is now to start its instance."""
        with self._free:
            for place in self._places:
                if (process := place.process) is not None and not process.started:
                    process.started = True
                    return process
            return None

    def _free_one(self) -> Process | None:
        mine = self.seats.number(len(self._places)) if self.sticky else None
        for place in self._places:
            process = place.process
            if process is not None and not process.borrowed and mine in (None, place.number):
                return process
        return None

    def _check(self, call: Call) -> None:
        if self._closed:
            raise Unavailable("the model was unloaded")
        if self._failure and not self.live:
            wait = max(0.0, min(place.due for place in self._places) - time.monotonic())
            raise Unavailable(f"{self.program.name}: {self._failure}", retry_after=max(1.0, wait))
        if (reason := reason_to_skip(call)) is not None:
            raise reason

    # --- care ---

    def _looks(self) -> list[Callable[[], object]]:
        """What the keeper's thread does, again and again."""
        with self._free:
            return [*(partial(self._look, place) for place in self._places), self._forget]

    def _look(self, place: Place) -> None:
        now = time.monotonic()
        if (process := place.process) is not None:
            try:
                look_at(process, self.hang_seconds, self.longest_run)
            finally:
                if process.lost:
                    self.lose(process)
        elif (coming := place.coming) is not None:
            look_at_coming(coming, now - place.begun, self._care, self._load_seconds)
        elif place.due and now >= place.due and not self._closed:
            self._replace(place)

    def _forget(self) -> None:
        with self._free:
            self._gone = [process for process in self._gone if not process.forget()]

    def lose(self, process: Process) -> None:
        """On any thread: it is not called any more, and will be replaced."""
        self.on_lost(process.number)
        with self._free:
            place = next((one for one in self._places if one.process is process), None)
            if place is None:
                return
            place.process = None
            self.seats.lose(place.number)
            self._gone.append(process)
            self.live -= 1
            none_left = not self.live
            if self._closed:
                return
            if time.monotonic() - place.begun >= self._care.steady:
                place.lost_in_a_row = 0
            delay = place.put_off(self._care)
            self._restarts["hung" if process.hung else "ended"] += 1
        # As texts: what keeps the record must not keep the process.
        log.error("%s %s; it is replaced in %.1f s", str(process), process.lost, delay)
        if none_left:
            self.changed()

    def _replace(self, place: Place) -> None:
        """On the keeper's thread."""
        try:
            loading = partial(self._load_again, place, self._start(place))
            threading.Thread(target=loading, name=f"{self.program.name} loads again", daemon=True).start()
        except Exception as error:
            if place.coming is not None:
                self._give_back(place, place.coming)
            self._not_replaced(place, error)

    def _load_again(self, place: Place, process: Process) -> None:
        try:
            self._loaded(place, process, self.warm)
        except BaseException as error:
            self._not_replaced(place, error)
        else:
            log.info("%s takes the place of the one that was lost", str(process))

    def _not_replaced(self, place: Place, error: BaseException) -> None:
        with self._free:
            delay = place.put_off(self._care)
            self._failure = f"its process was lost and could not be replaced: {error}"
            self._free.notify_all()
            if self._closed:
                return
        text = "%s: process %d could not be replaced, the next try is in %.1f s: %s"
        log.error(text, self.program.name, place.number, delay, str(error))

    # --- the end ---

    def give_up(self) -> None:
        """On any thread: end all at once; whoever waits for one gets an error."""
        self._kill("was given up", lambda _: True)

    def abandon(self) -> None:
        """On any thread: end those that run a call, unless the model is being closed; no call waits any more."""
        if not self._closed:
            self._kill("ran a call that did not end in time", lambda process: process.busy)

    def _kill(self, why: str, which: Callable[[Process], bool]) -> None:
        with self._free:
            self._closed = True
            self._free.notify_all()
            there = self.there()
        for process in filter(which, there):
            process.kill(why)

    def there(self) -> list[Process]:
        """Those that run, or are to, and those that are gone and not forgotten."""
        return [one for place in self._places for one in (place.process, place.coming) if one] + self._gone

    def close(self) -> None:
        """Have every process close its model and end; nobody calls them any more. Blocks."""
        with self._free:
            self._closed = True
            self._free.notify_all()
            there = self.there()
            coming = {place.coming for place in self._places}
            self.live = 0
        for process in there:
            if process in coming:
                process.kill("was given up")
            elif not process.lost:
                process.ask_to_end()
        until = time.monotonic() + self._care.end_patience
        for process in there:
            process.end(max(0.0, until - time.monotonic()), self._care.more_patience)
        # It may just have started one more.
        self._keeper.end()
        with self._free:
            there = [process for process in self.there() if process not in there]
            self._places.clear()
            self._gone.clear()
        for process in there:
            process.kill("was given up")
            process.end(self._care.more_patience, 0.0)
        self.program.environment.close()

    def readings(self) -> Iterator[Reading]:
        """The processes that live, and how many were replaced."""
        yield Reading("processes", "Processes that can run the model.", self.live)
        text = "Processes of the model that were lost, and are replaced."
        for reason, count in self._restarts.items():
            yield Reading("processes_lost", text, count, {"reason": reason}, counter=True)
