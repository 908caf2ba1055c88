"""`Pool`, the processes of one model: chooses a process for each call, and replaces lost processes.

Strategy: one thread of the pool starts all processes, so that the system can end them with it, and another one
checks them periodically. A process that has ended or hangs is dropped at once, and replaced after a delay that
grows as long as the replacements are short-lived. Each caller checks out a free process, and waits while there is
none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import ModelLoadError, Unavailable
from triglot.core.statistics import Reading
from triglot.executors.remote.calls import Calls, Lost, NotBegun
from triglot.executors.remote.channel import BEAT_SECONDS
from triglot.executors.remote.place import Place, Program
from triglot.executors.remote.process import Process
from triglot.executors.work import reason_to_skip
from triglot.model.metrics import ModelMetrics

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Limit on the instances that an idempotent call is tried on: it may be what ends them."""


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


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one instance in a pool: its process, or that of its replacement.

    `number` is the instance's. `process` takes calls; `loading` is not ready yet. Without either, the next process
    is started at `due` (0: none is scheduled). `begun` is when the process became ready.
    `lost_in_a_row` counts losses and failed restarts since a process last proved steady (`RestartPolicy`). A slot
    that is `removing` gets no more calls. Times are `time.monotonic()` instants.
    """

    number: int
    process: Process | None = None
    loading: Process | None = None
    begun: float = 0.0
    due: float = 0.0
    lost_in_a_row: int = 0
    removing: bool = False

    def schedule_restart(self, policy: RestartPolicy) -> float:
        """Schedule the next process; returns the delay in seconds, which doubles with each call in a row."""
        delay = min(policy.first_delay * 2.0 ** min(self.lost_in_a_row, 60), policy.longest_delay)
        self.lost_in_a_row += 1
        self.due = time.monotonic() + delay
        return delay


class Checkout:
    """A process reserved for one call, as a context manager that gives the process's `Calls`.

    It suppresses `NotBegun`, and of an idempotent model's call `Lost`: the process was lost before it received the
    call, or has responded, so the caller tries another one.
    """

    # Not a `contextlib` generator, which takes as long as sending small tensors.
    __slots__ = ("_call", "_pool", "_process")

    def __init__(self, pool: Pool, process: Process, call: Call) -> None:
        self._pool = pool
        self._process = process
        self._call = call

    def __enter__(self) -> Calls:
        return self._process.calls

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self._pool.end_reservation(self._process)
        return kind is NotBegun or (kind is Lost and self._pool.runs_again(self._call, error))


class Pool:
    """The processes of one model. May be used on any thread.

    `changed` is called, on any thread, when the model gets its first process or loses its last one.
    """

    def __init__(self, program: Program, place: Place, policy: RestartPolicy = DEFAULT_POLICY) -> None:
        self.program = program
        self._place = place
        self.changed: Callable[[], object] = lambda: None
        self.warm: Callable[[Process], object] = lambda _: None
        """Called with each newly loaded process before it takes calls; its errors count as failures to load."""
        self.on_lost: Callable[[int, int], object] = lambda _, __: None
        """Called, on any thread, with the number of an instance whose process is lost, and its losses so far."""
        self.loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
        """Return the server's event loop, which runs calls of `async def` code and answers callbacks."""
        self.hang_seconds = self.longest_run = 0.0
        self.idempotent = False
        """Whether calls that were lost with their process run again in another one."""
        self.sticky = False
        """Whether each calling thread has a process of its own."""
        self._policy = policy
        self._slots: list[Slot] = []
        self._free = threading.Condition()
        self.live = 0  # Number of ready processes.
        self._failure = ""
        self._restarts = {"ended": 0, "hung": 0}
        self._load_seconds = 0.0
        self._closed = False
        self._removed: list[Process] = []
        self._threads = threading.local()
        """Of models with sequences: the number of each thread's process, and how often that had been lost."""
        self._numbers = itertools.count()
        self._losses: Counter[int] = Counter()
        self.metrics = ModelMetrics()
        self._starter = ThreadPoolExecutor(1, f"{program.name} starts")
        """Its thread starts all processes: the system ends them with it, where the system supports that."""
        self._over = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name=f"{program.name} processes", daemon=True)
        self._monitor.start()

    # --- start ---

    def open(self) -> dict[str, Any]:
        """Start the first process; returns what its model declares. Blocks. Raise `ModelLoadError`."""
        begun = time.monotonic()
        slot = Slot(0)
        with self._free:
            self._slots.append(slot)
        declared = self._fill(slot)
        self._load_seconds = time.monotonic() - begun
        return declared

    def grow(self, count: int) -> None:
        """Start processes until there are `count` in total, and wait until they are loaded.

        Raise `ModelLoadError`.
        """
        with self._free:
            more = [Slot(number) for number in range(len(self._slots), count)]
            self._slots += more
        if more:
            with ThreadPoolExecutor(len(more), f"{self.program.name} loads") as threads:
                all(threads.map(self._fill, more))

    def shrink(self, count: int) -> None:
        """Keep the first `count` processes; the others end after their current calls. Blocks until then."""
        with self._free:
            removed = self._slots[count:]
            for slot in removed:
                slot.removing = True
            self._free.wait_for(
                lambda: self._closed or all(slot.process is None or not slot.process.reserved for slot in removed)
            )
            if self._closed:
                return
            self._slots = [slot for slot in self._slots if slot not in removed]
            stopping = [slot.process for slot in removed if slot.process is not None]
            loading = [slot.loading for slot in removed if slot.loading is not None]
            self._removed += [*stopping, *loading]
            self.live -= len(stopping)
        for process in loading:
            process.kill("was stopped")
        for process in stopping:
            process.ask_to_end()
        until = time.monotonic() + self._policy.end_timeout
        for process in stopping:
            process.end(max(0.0, until - time.monotonic()), self._policy.kill_timeout)

    def _fill(self, slot: Slot) -> dict[str, Any]:
        """Start a process for the slot, and load the model in it; returns what that declares. Blocks."""
        try:
            process = self._starter.submit(self._start, slot).result()
        except (OSError, RuntimeError) as error:
            raise ModelLoadError(f"{self.program.file}: cannot start its {self.program.kind}: {error}") from error
        try:
            declared = process.load(lambda: self.loop())  # noqa: PLW0108 - set after the first one is loaded.
            self.warm(process)
        except BaseException:
            process.kill("could not load its model")
            with self._free:
                slot.loading = None
                self._removed.append(process)
            raise
        with self._free:
            slot.loading = None
            if process.lost:
                self._removed.append(process)
                raise ModelLoadError(f"{self.program.file}: its {self.program.kind} {process.lost}")
            slot.process, slot.begun = process, time.monotonic()
            self.live += 1
            self._failure = ""
            self._free.notify_all()
            first = self.live == 1
        if first:
            self.changed()
        return declared

    def _start(self, slot: Slot) -> Process:
        """Start a process for the slot. Raise `OSError`."""
        if self._closed:
            raise OSError("loading was cancelled")
        body = self._place.start(self.program, slot.number)
        process = Process(self.program, slot.number, body, self.metrics.apply)
        with self._free:
            slot.loading = process
        if bool(self._closed):  # It was closed meanwhile.
            process.kill("was stopped")
        return process

    # --- calls ---

    def checkout(self, call: Call) -> Checkout | None:
        """Reserve the available process that runs the fewest calls. Return None while all are busy or loading.

        Raise `Unavailable` if none will be available soon, and `Cancelled` or `DeadlineExceeded` for a call that
        was cancelled or has expired.
        """
        try:
            with self._free:
                if self.sticky and self._is_stale:
                    raise Unavailable(
                        f"{self.program.name}: the {self.program.kind} for the request's sequence was lost"
                    )
                process = self._free_process()
                if process is None:
                    self._check(call)
                    return None
                process.reserved += 1
                return Checkout(self, process, call)
        except BaseException:
            if self.sticky:  # If this was the first call of a sequence, that has not begun in the process.
                self._report_loss(self._number())
            raise

    def bind(self, number: int, losses: int) -> None:
        """Bind the calling thread to the process of this number, which had been lost `losses` times."""
        self._threads.number, self._threads.losses = number, losses

    def _number(self) -> int:
        """Return the number of the calling thread's process; a thread without one is bound to the next."""
        if not hasattr(self._threads, "number"):
            self._threads.number = next(self._numbers) % max(1, len(self._slots))
        number: int = self._threads.number
        return number

    @property
    def _is_stale(self) -> bool:
        """Whether the calling thread's process was lost since the thread was bound to it."""
        losses = getattr(self._threads, "losses", None)
        return losses is not None and losses != self._losses[self._threads.number]

    def _report_loss(self, number: int) -> None:
        self.on_lost(number, self._losses[number])

    def wait(self) -> None:
        """Block until a process may be free, for `BEAT_SECONDS` at most: a cancelled call notifies no waiter."""
        with self._free:
            self._free.wait(BEAT_SECONDS)

    def end_reservation(self, process: Process) -> None:
        """End the reservation of a call that has ended."""
        if process.lost:
            self.lose(process)
        with self._free:
            process.reserved -= 1
            self._free.notify_all()

    def runs_again(self, call: Call, error: BaseException | None) -> bool:
        """Return whether a call whose process was lost is to run in another one.

        Raise `Unavailable` if it has been lost `MAX_TRIES` times.
        """
        if not self.idempotent or self._closed or call.cancelled:
            return False
        call.losses += 1
        if call.losses >= MAX_TRIES:
            raise Unavailable(f"{error}; the request was tried {MAX_TRIES} times") from None
        return True

    def _free_process(self) -> Process | None:
        mine = self._number() if self.sticky else None
        found, least = None, math.inf
        for slot in self._slots:
            process = slot.process
            if process is None or process.lost or slot.removing or mine not in (None, slot.number):
                continue
            if (
                process.reserved < process.capacity
                and (load := max(process.reserved, process.calls.count)) < least
            ):
                found, least = process, load
        return found

    def unstarted(self) -> Process | None:
        """Return a process whose instance was not started yet, marked as started; None if there is none."""
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

    # --- checks by the monitor ---

    def _watch(self) -> None:
        """Check all processes periodically, whatever fails; of failures in a row only the first is logged."""
        failing = False
        while not self._over.wait(BEAT_SECONDS):
            failed = False
            checks: list[Callable[[], object]] = [partial(self._check_slot, slot) for slot in list(self._slots)]
            for check in (*checks, self._forget):
                try:
                    check()
                except BaseException:
                    failed = True
                    if not failing:
                        log.exception("%s: a check failed; the next checks follow", self.program.name)
            failing = failed

    def _check_slot(self, slot: Slot) -> None:
        now = time.monotonic()
        if (process := slot.process) is not None:
            try:
                process.check(self.hang_seconds, self.longest_run)
            finally:
                if process.lost:
                    self.lose(process)
        elif (loading := slot.loading) is not None:
            usual = self._load_seconds  # 0 while the first process loads.
            timeout = max(self._policy.load_timeout, 10 * usual) if usual else math.inf
            loading.check_loading(timeout)
        elif slot.due and now >= slot.due and not self._closed:
            self._replace(slot)

    def _forget(self) -> None:
        with self._free:
            self._removed = [process for process in self._removed if not process.forget()]

    def lose(self, process: Process) -> None:
        """Drop a lost process, and schedule its replacement. On any thread."""
        with self._free:
            slot = next((slot for slot in self._slots if slot.process is process), None)
            if slot is None:
                return
            slot.process = None
            self._losses[slot.number] += 1
            self._report_loss(slot.number)
            self._removed.append(process)
            self.live -= 1
            none_left = not self.live
            if self._closed or slot.removing:
                self._free.notify_all()
                return
            if time.monotonic() - slot.begun >= self._policy.steady:
                slot.lost_in_a_row = 0
            delay = slot.schedule_restart(self._policy)
            self._restarts["hung" if process.hung else "ended"] += 1
        # As strings: a handler that keeps the log record must not keep the process.
        log.error("%s %s; it is restarted in %.1f s", str(process), process.lost, delay)
        if none_left:
            self.changed()

    def _replace(self, slot: Slot) -> None:
        """Start the next process, and load the model in it, on another thread."""
        slot.due = 0.0
        try:
            name = f"{self.program.name} loads again"
            threading.Thread(target=self._fill_again, args=(slot,), name=name, daemon=True).start()
        except RuntimeError as error:  # There are too many threads.
            self._not_replaced(slot, error)

    def _fill_again(self, slot: Slot) -> None:
        try:
            self._fill(slot)
        except BaseException as error:
            self._not_replaced(slot, error)
        else:
            log.info("%s: %s %d was restarted", self.program.name, self.program.kind, slot.number)

    def _not_replaced(self, slot: Slot, error: BaseException) -> None:
        with self._free:
            delay = slot.schedule_restart(self._policy)
            self._failure = f"its {self.program.kind} was lost and could not be restarted: {error}"
            self._free.notify_all()
            if self._closed:
                return
        text = "%s: %s %d could not be restarted, retrying in %.1f s: %s"
        log.error(text, self.program.name, self.program.kind, slot.number, delay, str(error))

    # --- end ---

    def cancel_load(self) -> None:
        """Kill all processes; waiting calls fail. On any thread."""
        self._kill("was stopped", lambda _: True)

    def abandon(self) -> None:
        """Kill the processes that run a call, unless the pool is closed; waiting calls fail. On any thread."""
        if not self._closed:
            self._kill("ran a call that did not end before the unload timeout", lambda process: process.busy)

    def _kill(self, why: str, which: Callable[[Process], bool]) -> None:
        with self._free:
            self._closed = True
            self._free.notify_all()
            processes = self.processes()
        for process in filter(which, processes):
            process.kill(why)

    def processes(self) -> list[Process]:
        """Return all processes: ready, loading, and lost ones that are not released yet."""
        return [
            process for slot in self._slots for process in (slot.process, slot.loading) if process
        ] + self._removed

    def check_ready(self) -> bool:
        """Return whether the readiness check of the model passes in every ready process. Blocks."""
        return all(process.check_ready() for process in self.ready())

    def ready(self) -> list[Process]:
        """Return the processes that take calls."""
        return [process for slot in self._slots if (process := slot.process) is not None]

    def close(self) -> None:
        """Have every process close its model and end; there are no more calls. Blocks."""
        with self._free:
            self._closed = True
            self._free.notify_all()
            self.live = 0
        with suppress(RuntimeError):  # The interpreter ends.
            self._starter.submit(int).result()  # Until a start that was running has ended.
        processes = self.processes()
        loading = {slot.loading for slot in self._slots}
        for process in processes:
            if process in loading:
                process.kill("was stopped")
            elif not process.lost:
                process.ask_to_end()
        until = time.monotonic() + self._policy.end_timeout
        for process in processes:
            process.end(max(0.0, until - time.monotonic()), self._policy.kill_timeout)
        self._over.set()
        self._monitor.join()
        with self._free:
            self._slots.clear()
            self._removed.clear()
        self._starter.shutdown()
        self._place.close()

    def readings(self) -> Iterator[Reading]:
        """Yield metrics: ready processes, in total and by cluster node, processes wanted, and processes lost."""
        yield Reading("processes", "Ready processes of the model.", self.live)
        yield Reading("processes_wanted", "Processes of the model when all are ready.", len(self._slots))
        for place, count in Counter(tuple(process.body.labels.items()) for process in self.ready()).items():
            if place:
                yield Reading(
                    "node_instances", "Ready instances of the model, by cluster node.", count, dict(place)
                )
        text = "Lost processes of the model, by reason; each is restarted."
        for reason, count in self._restarts.items():
            yield Reading("processes_lost", text, count, {"reason": reason}, counter=True)
