"""The processes of a model: who runs the next call, and what becomes of one that is lost.

Strategy: a thread of the pool's own starts all of them, so that the system can end them with it, and checks them
again and again: a process that has ended or hangs is given up at once, and replaced after a delay that grows while
these last only for a short time. Whoever has a call takes a process that is free, and waits while there is none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import ModelLoadError, Unavailable
from triglot.core.readings import Reading
from triglot.executors.process.affinity import ThreadAffinity
from triglot.executors.process.calls import Calls, NotBegun
from triglot.executors.process.health import BEAT_SECONDS
from triglot.executors.process.monitor import DEFAULT_POLICY, ProcessMonitor, RestartPolicy
from triglot.executors.process.notices import Notice, PoolMetrics
from triglot.executors.process.process import Process, Program
from triglot.executors.work import reason_to_skip

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Slot:
    """Where there is a process, or will be one: `loading` is not ready yet, and the next one is started when it is
    `due`. One that `goes` gets no more calls."""

    number: int
    process: Process | None = None
    loading: Process | None = None
    begun: float = 0.0
    due: float = 0.0
    lost_in_a_row: int = 0
    goes: bool = False

    def put_off(self, policy: RestartPolicy) -> float:
        """Seconds until the next one is started."""
        delay = min(policy.first_delay * 2.0 ** min(self.lost_in_a_row, 60), policy.longest_delay)
        self.lost_in_a_row += 1
        self.due = time.monotonic() + delay
        return delay


Start = Callable[[Program, int, Callable[[Notice], object]], Process]
"""Starts a process, with its number among those of its model; see `Process.start`."""


class Checkout:
    """A process that runs one call: a `with` block has its calls. One that was lost before it got the call leaves
    the block, for another one to run it."""

    # What `contextlib` makes of a generator takes as long as to hand over small tensors.
    __slots__ = ("_pool", "_process")

    def __init__(self, pool: Pool, process: Process) -> None:
        self._pool = pool
        self._process = process

    def __enter__(self) -> Calls:
        calls = self._process.calls
        assert calls is not None, "a process that is called is not closed"
        return calls

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._pool.give_back(self._process)
        return kind is NotBegun


class Pool:
    """The processes of one model. `changed` is called, on any thread, when the model becomes alive or not."""

    def __init__(
        self, program: Program, policy: RestartPolicy = DEFAULT_POLICY, start: Start = Process.start
    ) -> None:
        self._start_process = start
        self.program = program
        self.changed: Callable[[], object] = lambda: None
        self.warm: Callable[[Process], object] = lambda _: None
        """Runs on each process that replaces another, before it is called. What it raises is a failure to load."""
        self.on_lost: Callable[[int, int], object] = lambda _, __: None
        """Gets, on any thread, the number of a process that is lost, and how often it has been."""
        self.loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
        """The server's, where calls are answered and what they ask for is."""
        self.hang_seconds = self.longest_run = 0.0
        self.sticky = False
        """Whether each thread that calls has a process of its own."""
        self._policy = policy
        self._slots: list[Slot] = []
        self._free = threading.Condition()
        self.live = 0  # How many there are.
        self._failure = ""
        self._restarts = {"ended": 0, "hung": 0}
        self._load_seconds = 0.0
        self._closed = False
        self._gone: list[Process] = []
        self.affinity = ThreadAffinity()
        self.metrics = PoolMetrics(lambda: [process.notices for process in self.there()])
        self._monitor = ProcessMonitor(f"{program.name} processes", self._checks)

    # --- the beginning ---

    def open(self) -> dict[str, Any]:
        """What the model declares, once a first process has loaded it. Raises `ModelLoadError`."""
        begun = time.monotonic()
        slot = Slot(0)
        with self._free:
            self._slots.append(slot)
        declared = self._fill(slot)
        self._load_seconds = time.monotonic() - begun
        return declared

    def grow(self, count: int) -> None:
        """Have `count` processes in all, once they are loaded. Raises `ModelLoadError`."""
        with self._free:
            more = [Slot(number) for number in range(len(self._slots), count)]
            self._slots += more
        errors: list[Exception] = []

        def fill(slot: Slot) -> None:
            try:
                self._fill(slot)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=fill, args=(slot,), daemon=True) for slot in more]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def shrink(self, count: int) -> None:
        """Have the first `count` processes; the others end once they have ended what they run. Blocks."""
        with self._free:
            going = self._slots[count:]
            for slot in going:
                slot.goes = True
            self._free.wait_for(
                lambda: self._closed or all(slot.process is None or not slot.process.reserved for slot in going)
            )
            if self._closed:
                return
            self._slots = [slot for slot in self._slots if slot not in going]
            ended = [slot.process for slot in going if slot.process is not None]
            loading = [slot.loading for slot in going if slot.loading is not None]
            self._gone += [*ended, *loading]
            self.live -= len(ended)
        for process in loading:
            process.kill("was stopped")
        for process in ended:
            process.ask_to_end()
        until = time.monotonic() + self._policy.end_timeout
        for process in ended:
            process.end(max(0.0, until - time.monotonic()), self._policy.kill_timeout)

    def _fill(self, slot: Slot) -> dict[str, Any]:
        """Not on the monitor's thread: start a process there and load the model."""
        try:
            process = self._monitor.do(partial(self._start, slot))
        except OSError as error:
            raise ModelLoadError(f"{self.program.file}: cannot start its {self.program.kind}: {error}") from error
        return self._loaded(slot, process, self.warm)

    def _start(self, slot: Slot) -> Process:
        """On the monitor's thread."""
        if self._closed:
            raise OSError("loading was cancelled")
        process = self._start_process(self.program, slot.number, self.metrics.apply)
        with self._free:
            slot.loading, slot.begun = process, time.monotonic()
        if bool(self._closed):  # By now.
            process.kill("was stopped")
        return process

    def _loaded(self, slot: Slot, process: Process, warm: Callable[[Process], object]) -> dict[str, Any]:
        try:
            declared = process.load(self.program, self._the_loop)
            warm(process)
        except BaseException:
            self._drop(slot, process)
            raise
        with self._free:
            slot.loading = None
            if process.lost:
                self._gone.append(process)
                raise ModelLoadError(f"{self.program.file}: its {process.kind} {process.lost}")
            slot.process, slot.begun = process, time.monotonic()
            self.live += 1
            self._failure = ""
            self._free.notify_all()
            first = self.live == 1
        if first:
            self.changed()
        return declared

    def _the_loop(self) -> asyncio.AbstractEventLoop:
        if (loop := self.loop()) is None:
            raise RuntimeError("no server runs the model")
        return loop

    def _drop(self, slot: Slot, process: Process) -> None:
        process.kill("could not load its model")
        with self._free:
            slot.loading = None
            self._gone.append(process)

    # --- calls ---

    def checkout(self, call: Call) -> Checkout | None:
        """The process that runs the fewest calls, and may run this one. None while there is none.

        Raises `Unavailable` when there will be none soon, and `ServingError` for a call that nobody waits for any
        more.
        """
        try:
            with self._free:
                if self.sticky and self.affinity.is_stale:
                    raise Unavailable(
                        f"{self.program.name}: the {self.program.kind} for the request's sequence was lost"
                    )
                process = self._free_one()
                if process is None:
                    self._check(call)
                    return None
                process.reserved += 1
                return Checkout(self, process)
        except BaseException:
            if self.sticky:  # Nor has a sequence begun that this was the first call of.
                self._report_loss(self.affinity.number(len(self._slots)))
            raise

    def _report_loss(self, number: int) -> None:
        self.on_lost(number, self.affinity.losses(number))

    def wait(self) -> None:
        """On a thread: until one may have become free. Nobody says when a call is cancelled."""
        with self._free:
            self._free.wait(BEAT_SECONDS)

    def give_back(self, process: Process) -> None:
        """The call has ended."""
        if process.lost:
            self.lose(process)
        with self._free:
            process.reserved -= 1
            self._free.notify_all()

    def _free_one(self) -> Process | None:
        mine = self.affinity.number(len(self._slots)) if self.sticky else None
        found, least = None, math.inf
        for slot in self._slots:
            process = slot.process
            if process is None or process.lost or slot.goes or mine not in (None, slot.number):
                continue
            if process.reserved < process.capacity and (load := max(process.reserved, process.count)) < least:
                found, least = process, load
        return found

    def unstarted(self) -> Process | None:
        """On any thread: one that is now to start its instance."""
        with self._free:
            for slot in self._slots:
                if (process := slot.process) is not None and not process.started:
                    process.started = True
                    return process
            return None

    def _check(self, call: Call) -> None:
        if self._closed:
            raise Unavailable("the model was unloaded")
        if self._failure and not self.live:
            wait = max(0.0, min(slot.due for slot in self._slots) - time.monotonic())
            raise Unavailable(f"{self.program.name}: {self._failure}", retry_after=max(1.0, wait))
        if (reason := reason_to_skip(call)) is not None:
            raise reason

    # --- what the monitor does ---

    def _checks(self) -> list[Callable[[], object]]:
        """Again and again."""
        with self._free:
            return [*(partial(self._check_slot, slot) for slot in self._slots), self._forget]

    def _check_slot(self, slot: Slot) -> None:
        now = time.monotonic()
        if (process := slot.process) is not None:
            try:
                process.check(self.hang_seconds, self.longest_run)
            finally:
                if process.lost:
                    self.lose(process)
        elif (loading := slot.loading) is not None:
            usual = self._load_seconds  # 0: this is the first one.
            timeout = max(self._policy.load_timeout, 10 * usual) if usual else math.inf
            loading.check_loading(now - slot.begun, timeout)
        elif slot.due and now >= slot.due and not self._closed:
            self._replace(slot)

    def _forget(self) -> None:
        with self._free:
            self._gone = [process for process in self._gone if not process.forget()]

    def lose(self, process: Process) -> None:
        """On any thread: it is not called any more, and will be replaced."""
        with self._free:
            slot = next((one for one in self._slots if one.process is process), None)
            if slot is None:
                return
            slot.process = None
            self.affinity.lose(slot.number)
            self._report_loss(slot.number)
            self._gone.append(process)
            self.live -= 1
            none_left = not self.live
            if self._closed or slot.goes:
                self._free.notify_all()
                return
            if time.monotonic() - slot.begun >= self._policy.steady:
                slot.lost_in_a_row = 0
            delay = slot.put_off(self._policy)
            self._restarts["hung" if process.hung else "ended"] += 1
        # As texts: what keeps the record must not keep the process.
        log.error("%s %s; it is restarted in %.1f s", str(process), process.lost, delay)
        if none_left:
            self.changed()

    def _replace(self, slot: Slot) -> None:
        """On the monitor's thread."""
        try:
            loading = partial(self._load_again, slot, self._start(slot))
            threading.Thread(target=loading, name=f"{self.program.name} loads again", daemon=True).start()
        except Exception as error:
            if slot.loading is not None:
                self._drop(slot, slot.loading)
            self._not_replaced(slot, error)

    def _load_again(self, slot: Slot, process: Process) -> None:
        try:
            self._loaded(slot, process, self.warm)
        except BaseException as error:
            self._not_replaced(slot, error)
        else:
            log.info("%s replaced the lost %s", str(process), process.kind)

    def _not_replaced(self, slot: Slot, error: BaseException) -> None:
        with self._free:
            delay = slot.put_off(self._policy)
            self._failure = f"its {self.program.kind} was lost and could not be restarted: {error}"
            self._free.notify_all()
            if self._closed:
                return
        text = "%s: %s %d could not be restarted, retrying in %.1f s: %s"
        log.error(text, self.program.name, self.program.kind, slot.number, delay, str(error))

    # --- the end ---

    def give_up(self) -> None:
        """On any thread: end all at once; whoever waits for one gets an error."""
        self._kill("was stopped", lambda _: True)

    def abandon(self) -> None:
        """On any thread: end those that run a call, unless the model is being closed; no call waits any more."""
        if not self._closed:
            self._kill("ran a call that did not end before the unload timeout", lambda process: process.busy)

    def _kill(self, why: str, which: Callable[[Process], bool]) -> None:
        with self._free:
            self._closed = True
            self._free.notify_all()
            there = self.there()
        for process in filter(which, there):
            process.kill(why)

    def there(self) -> list[Process]:
        """Those that run, or are to, and those that are gone and not forgotten."""
        return [one for slot in self._slots for one in (slot.process, slot.loading) if one] + self._gone

    def check_ready(self) -> bool:
        """Whether the model of every process that runs says that it is ready. Blocks."""
        return all(process.check_ready() for process in self.ready())

    def ready(self) -> list[Process]:
        """Those that take calls."""
        return [process for slot in self._slots if (process := slot.process) is not None]

    def close(self) -> None:
        """Have every process close its model and end; nobody calls them any more. Blocks."""
        with self._free:
            self._closed = True
            self._free.notify_all()
            there = self.there()
            loading = {slot.loading for slot in self._slots}
            self.live = 0
        for process in there:
            if process in loading:
                process.kill("was stopped")
            elif not process.lost:
                process.ask_to_end()
        until = time.monotonic() + self._policy.end_timeout
        for process in there:
            process.end(max(0.0, until - time.monotonic()), self._policy.kill_timeout)
        # It may just have started one more.
        self._monitor.end()
        with self._free:
            there = [process for process in self.there() if process not in there]
            self._slots.clear()
            self._gone.clear()
        for process in there:
            process.kill("was stopped")
            process.end(self._policy.kill_timeout, 0.0)
        self.program.environment.close()

    def readings(self) -> Iterator[Reading]:
        """The processes that live, how many there should be, and how many were replaced."""
        yield Reading("processes", "Ready processes of the model.", self.live)
        yield Reading("processes_wanted", "Processes of the model when all are ready.", len(self._slots))
        for place, count in Counter(tuple(process.place.items()) for process in self.ready()).items():
            if place:
                yield Reading(
                    "node_instances", "Ready instances of the model, by cluster node.", count, dict(place)
                )
        text = "Lost processes of the model, by reason; each is restarted."
        for reason, count in self._restarts.items():
            yield Reading("processes_lost", text, count, {"reason": reason}, counter=True)
