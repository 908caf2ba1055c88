"""The supervisor: starts workers, restarts and replaces them, and ends them when it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from triglot.config.options import Config, ConfigError
from triglot.config.watched_file import CHECK_SECONDS, WatchedFile
from triglot.dataplane.control import Bound
from triglot.platform.cpus import cpu_seconds, has_something_to_do
from triglot.platform.systemd import ServiceManager
from triglot.platform.tallies import SharedTallies, shared_size
from triglot.telemetry.merging import Page, growing, merged_pages
from triglot.workers.changes import Changes
from triglot.workers.channel import ChannelClosed
from triglot.workers.ports import Ports, reserve
from triglot.workers.process import KEPT, Snapshots, Worker, notify

log = logging.getLogger(__name__)

STABLE_SECONDS = 10.0
"""A worker that has served for at least this long is restarted without a delay."""
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Delay in seconds before a worker that has not is restarted; it doubles each time."""
MAX_FIRST_FAILURES = 3
"""Limit on workers killed by signals before any worker has served."""
SPARE_SECONDS = 30.0
"""Time for a worker to end, besides its calls' grace period."""
HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats, and for the reply."""
LATE_REPLY_SECONDS = 0.05
"""Seconds to read a reply that arrived while the supervisor itself was blocked."""
WORKING_SHARE = 0.02
"""Share of a processor that counts as work; threads that only check the time use less."""
FAILED = 1


class Slot:
    """The place of one worker, with its sockets. `replacing` is held while the worker is replaced."""

    def __init__(self, number: int, sockets: Bound) -> None:
        self.number = number
        self.sockets = sockets
        self.worker: Worker | None = None
        self.replacing = asyncio.Lock()
        self.failures = 0
        self.restarts = 0

    @property
    def delay(self) -> float:
        """Seconds to wait before its next worker is started."""
        return min(MAX_DELAY, FIRST_DELAY * 2 ** min(self.failures - 1, 10)) if self.failures else 0.0


class Supervisor:
    """Supervises the workers of `triglot ARGUMENTS`.

    `run` returns the exit status; `log_line` prints lines for users. The service manager is notified of the
    service as a whole: it is ready when the first worker serves, and reloads while workers are replaced.
    """

    def __init__(
        self,
        config: Config,
        arguments: Sequence[str],
        service_manager: ServiceManager,
        log_line: Callable[[str], object],
    ) -> None:
        self._config = config
        self._arguments = arguments
        self._service_manager = service_manager
        self._log_line = log_line
        self._slots: list[Slot] = []
        self._workers: list[Worker] = []
        self._changes = Changes(self._replace, config.load_timeout)
        self._retired = RetiredCounters()
        self._runs = 0
        self._over = asyncio.Event()
        self._status = 0
        self._announced = False
        self._rolling = False
        self._signals = 0
        self._notice = "leave"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ports: Ports
        self._access: WatchedFile | None = None
        self._tallies = -1
        """Descriptor of the file with clients' counters that all workers share."""

    async def run(self) -> int:
        """Run until a signal, or until no worker can be started. Raise `OSError` when a port is in use."""
        with tempfile.TemporaryFile() as tallies:
            tallies.truncate(shared_size(self._config.workers))
            self._tallies = tallies.fileno()
            return await self._run()

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stop, signal_number)
        loop.add_signal_handler(signal.SIGHUP, self._roll)
        self._ports, sockets = reserve(self._config)
        if self._config.access:
            self._spawn(self._watch_access(Path(self._config.access)))
        for number in range(1, self._config.workers + 1):
            self._slots.append(Slot(number, sockets if number == 1 else self._ports.bind()))
        slot_tasks = [asyncio.create_task(self._run_slot(slot)) for slot in self._slots]
        await self._over.wait()
        self._service_manager.stopping()
        for slot in self._slots:
            slot.sockets.close()  # Otherwise the ports would stay open until this process ends.
        await self._end_all()
        for task in (*slot_tasks, *self._tasks):
            task.cancel()
        log.info("stopped")
        return self._status

    # --- starting ---

    async def _run_slot(self, slot: Slot) -> None:
        """Keep a worker running in this slot until the end."""
        try:
            while not self._over.is_set():
                if slot.delay:
                    log.info("worker %d: restarting in %.1f s", slot.number, slot.delay)
                    await asyncio.sleep(slot.delay)
                worker = slot.worker = await self._start(slot)
                while True:
                    await worker.has_ended.wait()
                    async with slot.replacing:  # It may be being replaced.
                        if slot.worker is worker:
                            break
                        worker = slot.worker
                self._on_lost(slot, worker)
        except OSError as error:
            log.critical("cannot start a worker: %s", error)
            self._finish(FAILED)

    async def _start(self, slot: Slot) -> Worker:
        self._runs = run = self._runs + 1
        asked: list[Worker] = []

        async def answer(what: str, argument: Any) -> Any:
            return await self._answer(asked[0], what, argument)

        worker = await Worker.start(
            slot.number,
            run,
            self._ports,
            slot.sockets,
            self._tallies,
            self._arguments,
            answer,
        )
        asked.append(worker)
        self._workers.append(worker)
        self._spawn(self._watch(worker, run))
        log.debug("%s is started", worker)
        return worker

    async def _watch(self, worker: Worker, run: int) -> None:
        """Wait for the end of a worker, replaced or not; keep its counters, and drop what it held of clients."""
        await worker.has_ended.wait()
        self._workers.remove(worker)
        self._changes.leave(worker)
        self._take_counts(worker, worker.snapshots)
        if self._over.is_set():
            return
        # On a thread: a worker that hangs may hold the lock until it is killed, which is done here.
        await asyncio.to_thread(SharedTallies(self._tallies, self._config.workers, run).clear)

    def _take_counts(self, worker: Worker, last: dict[str, Any]) -> None:
        if not worker.is_retired:
            worker.is_retired = True
            self._retired.add(last)

    def _on_lost(self, slot: Slot, worker: Worker) -> None:
        """Handle the unexpected end of a worker."""
        if self._over.is_set():
            return
        now = asyncio.get_running_loop().time()
        stable = worker.served and now - worker.served >= STABLE_SECONDS
        slot.failures = 0 if stable else slot.failures + 1
        slot.restarts += 1
        log.error("%s %s", worker, worker.exit_reason())
        if not self._announced and (worker.status >= 0 or slot.failures >= MAX_FIRST_FAILURES):
            # The cause is the same for all workers, and was logged.
            self._finish(worker.status if worker.status > 0 else FAILED)
            return
        # Connections to a socket that no worker accepts from would wait for ever.
        fresh = self._ports.bind()
        slot.sockets.close()
        slot.sockets = fresh

    async def _watch_access(self, path: Path) -> None:
        """Keep the access file for workers that start later; those that run look at it themselves."""
        with suppress(ConfigError):  # The first worker says what is wrong.
            self._access = WatchedFile(path)
        while self._access is not None:
            await asyncio.sleep(CHECK_SECONDS)
            with suppress(ConfigError):
                self._access.replaced()

    # --- requests of workers ---

    async def _answer(self, worker: Worker, what: str, argument: Any) -> Any:
        if what == "access":
            return self._access and self._access.state
        if what == "state":
            return [change.fields() for change in self._changes.record.after(argument)]
        if what == "join":
            return [change.fields() for change in self._changes.join(worker, argument)]
        if what == "serving":
            self._on_serving(worker, argument)
        elif what == "act":
            await self._changes.make(worker, *argument)
        elif what == "reports":
            return await self._reports(*argument)
        elif what == "final_counters":
            self._take_counts(worker, argument)
        return None

    def _on_serving(self, worker: Worker, hints: Sequence[str]) -> None:
        worker.served = asyncio.get_running_loop().time()
        worker.serving.set()
        if not self._announced:
            self._announced = True
            for line in hints:
                self._log_line(line)
            self._service_manager.ready()
            self._spawn(self._service_manager.feed_watchdog())
        log.info("%s serves", worker)
        if self._config.worker_timeout:
            self._spawn(self._watch_heartbeat(worker, self._config.worker_timeout))

    async def _watch_heartbeat(self, worker: Worker, seconds: float) -> None:
        """Kill the worker when it hangs: clients would keep connecting to it."""
        with suppress(ChannelClosed):
            await wait_until_hung(worker.pid, partial(worker.ask, "alive"), seconds)
            log.error("%s sent no heartbeat for %g s; killing it", worker, seconds)
            worker.kill()

    async def _reports(self, name: str, arguments: Any) -> Any:
        workers = [worker for worker in self._workers if worker.served]
        answers = await asyncio.gather(*(worker.report(name, arguments) for worker in workers))
        pairs = zip(workers, answers, strict=True)
        # Workers that have ended meanwhile are counted in the past.
        found = [(worker.number, *reply) for worker, reply in pairs if not worker.is_retired]
        return {
            "workers": [[number, report] for number, report, _ in found if report is not None],
            "past": self._retired.total(name),
            "up": [number for number, _, now in found if now],
            "restarts": [[slot.number, slot.restarts] for slot in self._slots],
        }

    # --- replacing ---

    def _replace(self, worker: Worker) -> None:
        """Replace a worker whose state differs from the others'."""
        for slot in self._slots:
            if slot.worker is worker:
                self._spawn(self._renew(slot))

    def _roll(self) -> None:
        """Replace all workers, one by one."""
        if not (self._rolling or self._over.is_set()):
            self._rolling = True
            self._spawn(self._renew_all())

    async def _renew_all(self) -> None:
        log.info("rolling restart: replacing the workers one by one")
        self._service_manager.reloading()
        try:
            for slot in self._slots:
                if not await self._renew(slot) and not self._over.is_set():
                    log.error(
                        "rolling restart: worker %d could not be replaced; the others keep running", slot.number
                    )
                    return
            log.info("rolling restart: all workers are replaced")
        finally:
            self._rolling = False
            if self._announced and not self._over.is_set():
                self._service_manager.ready()

    async def _renew(self, slot: Slot) -> bool:
        """Start a successor, and end the old worker once it serves; return whether it does."""
        async with slot.replacing:
            old = slot.worker
            successor = await self._start(slot)
            serving = asyncio.create_task(successor.serving.wait())
            successor_end = asyncio.create_task(successor.has_ended.wait())
            await asyncio.wait([serving, successor_end], return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            successor_end.cancel()
            if self._over.is_set():
                return False
            if not successor.serving.is_set() or successor.has_ended.is_set():
                log.error("%s, the replacement of %s, %s", successor, old, successor.exit_reason())
                return False
            slot.worker = successor
            slot.restarts += 1
        if old is not None:
            old.retiring = True
            # It makes no further changes, and only finishes its calls.
            self._changes.leave(old)
            acknowledged = await notify(old, "retire")
            await self._wait_ended([old], self._timeout(self._config.drain_delay, acknowledged))
        return True

    # --- stopping ---

    def _stop(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("stopped at once")
            self._status = FAILED
            for worker in self._workers:
                worker.kill()
            return
        log.info("stopping; a second signal stops at once")
        self._notice = "stop" if number is signal.SIGTERM else "leave"
        self._over.set()

    def _finish(self, status: int) -> None:
        self._status = self._status or status
        self._notice = "leave"
        self._over.set()

    async def _end_all(self) -> None:
        await asyncio.gather(*map(self._end, list(self._workers)))

    async def _end(self, worker: Worker) -> None:
        delay = self._config.drain_delay if self._notice == "stop" else 0.0
        acknowledged = worker.retiring or await notify(worker, self._notice)
        await self._wait_ended([worker], self._timeout(delay, acknowledged))

    def _timeout(self, delay: float, acknowledged: bool) -> float:
        """Return the seconds to wait for the end of a worker that continues to serve for `delay` seconds."""
        # A worker that has not acknowledged may be busy with a call, or hang.
        return delay + 2 * self._config.grace + SPARE_SECONDS if acknowledged else self._config.grace

    async def _wait_ended(self, workers: Sequence[Worker], seconds: float) -> None:
        """Wait for workers to end; kill those that take longer."""
        ends = [asyncio.create_task(worker.has_ended.wait()) for worker in workers]
        if not ends:
            return
        await asyncio.wait(ends, timeout=seconds)
        for worker in workers:
            if not worker.has_ended.is_set():
                log.error("%s did not exit within %.0f s; killing it", worker, seconds)
                worker.kill()
        await asyncio.wait(ends)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error in the supervisor", exc_info=error)


def supervise(config: Config, arguments: Sequence[str], service_manager: ServiceManager) -> int:
    """Supervise the workers of `triglot ARGUMENTS`; return the exit status. Raise `OSError`."""
    return asyncio.run(Supervisor(config, arguments, service_manager, partial(print, flush=True)).run())


class RetiredCounters:
    """The sums of ended workers' reports, so that sums over all workers never decrease."""

    def __init__(self) -> None:
        self._sums: dict[str, Page] = {}

    def add(self, last: Snapshots) -> None:
        """Add the last reports of a worker."""
        for name in KEPT:
            if name in last:
                pages = [*([self._sums[name]] if name in self._sums else []), last[name]]
                self._sums[name] = merged_pages([(0, growing(page)) for page in pages])

    def total(self, name: str) -> Page | None:
        """Return the sum of a report."""
        return self._sums.get(name)


async def wait_until_hung(pid: int, ask: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Return once the process has neither replied nor worked for `seconds`. Raise what `ask` raises.

    A reply to `ask`, the heartbeat, means that its event loop runs. A worker without a reply may be computing, or
    waiting for a processor or a disk, and will recover. One that does neither for long hangs: it was stopped, or
    native code holds the interpreter's lock while it waits. Clients whose connections the kernel assigns to it
    would wait for ever.
    """
    silent, used = 0.0, cpu_seconds(pid)
    asked = asyncio.ensure_future(ask())
    try:
        while silent < seconds:
            for timeout in (HEARTBEAT_SECONDS, LATE_REPLY_SECONDS):
                await asyncio.wait([asked], timeout=timeout)
            before, used = used, cpu_seconds(pid)
            if asked.done():
                asked.result()
                silent = 0.0
                await asyncio.sleep(HEARTBEAT_SECONDS)
                used, asked = cpu_seconds(pid), asyncio.ensure_future(ask())
            elif used - before > WORKING_SHARE * HEARTBEAT_SECONDS or has_something_to_do(pid):
                silent = 0.0
            else:
                silent += HEARTBEAT_SECONDS
    finally:
        asked.cancel()
