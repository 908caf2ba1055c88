"""The supervisor: keeps workers running, replaces them, and has all of them end with itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from triglot.access.tallies import shared_size
from triglot.config.options import Config
from triglot.transports.listening import Bound
from triglot.workers.changes import Changes
from triglot.workers.channel import Gone
from triglot.workers.counts import Past
from triglot.workers.heartbeat import stands_still
from triglot.workers.ports import Ports, reserve
from triglot.workers.process import Worker, notify

log = logging.getLogger(__name__)

LASTING_SECONDS = 10.0
"""A worker that has served for so long may be replaced at once."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Until a worker that has not lasted is replaced, in seconds; each time it is twice as long."""
MOST_FIRST_FAILURES = 3
"""Workers that are killed before any has served."""
SPARE_SECONDS = 30.0
"""For the end of a worker, besides what it gives its calls."""
FAILED = 1


class Slot:
    """The place of a worker, and what listens there. `turn`: held by who replaces it."""

    def __init__(self, number: int, sockets: Bound) -> None:
        self.number = number
        self.sockets = sockets
        self.worker: Worker | None = None
        self.turn = asyncio.Lock()
        self.failures = 0
        self.restarts = 0

    @property
    def delay(self) -> float:
        """How long its next worker has to wait."""
        return min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self.failures - 1, 10)) if self.failures else 0.0


class Supervisor:
    """Of the workers of `triglot ARGUMENTS`. `run` returns the exit status; `say` prints lines for people."""

    def __init__(self, config: Config, arguments: Sequence[str], say: Callable[[str], object]) -> None:
        self._config = config
        self._arguments = arguments
        self._say = say
        self._slots: list[Slot] = []
        self._workers: list[Worker] = []
        self._changes = Changes(self._replace, config.load_timeout)
        self._past = Past()
        self._runs = 0
        self._over = asyncio.Event()
        self._status = 0
        self._said = False
        self._rolling = False
        self._signals = 0
        self._notice = "leave"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ports: Ports
        self._tallies = -1
        """The descriptor of the file that workers count clients' calls in."""

    async def run(self) -> int:
        """Until a signal, or until no worker can be started. Raises `OSError` when a port is taken."""
        with tempfile.TemporaryFile() as tallies:
            tallies.truncate(shared_size(self._config.workers))
            self._tallies = tallies.fileno()
            return await self._run()

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self._stop, one)
        loop.add_signal_handler(signal.SIGHUP, self._roll)
        self._ports, sockets = reserve(self._config)
        for number in range(1, self._config.workers + 1):
            self._slots.append(Slot(number, sockets if number == 1 else self._ports.bind()))
        keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        await self._over.wait()
        for slot in self._slots:
            slot.sockets.close()  # Or the ports would be open for as long as we are.
        await self._end_all()
        for keeper in (*keepers, *self._tasks):
            keeper.cancel()
        log.info("stopped")
        return self._status

    # --- workers come ---

    async def _keep(self, slot: Slot) -> None:
        """See to it that there is a worker, until the end."""
        try:
            while not self._over.is_set():
                if slot.delay:
                    log.info("worker %d: restarting in %.1f s", slot.number, slot.delay)
                    await asyncio.sleep(slot.delay)
                worker = slot.worker = await self._start(slot)
                while True:
                    await worker.ended.wait()
                    async with slot.turn:  # Somebody may be replacing it.
                        if slot.worker is worker:
                            break
                        worker = slot.worker
                self._lost(slot, worker)
        except OSError as error:
            log.critical("cannot start a worker: %s", error)
            self._finish(FAILED)

    async def _start(self, slot: Slot) -> Worker:
        self._runs += 1
        asked: list[Worker] = []

        async def answer(what: str, argument: Any) -> Any:
            return await self._answer(asked[0], what, argument)

        worker = await Worker.start(
            slot.number,
            self._runs,
            self._ports,
            slot.sockets,
            self._tallies,
            self._arguments,
            answer,
        )
        asked.append(worker)
        self._workers.append(worker)
        self._spawn(self._watch(worker))
        log.debug("%s is started", worker)
        return worker

    async def _watch(self, worker: Worker) -> None:
        """What is to be done at its end, whoever it is replaced by."""
        await worker.ended.wait()
        self._workers.remove(worker)
        self._changes.leave(worker)
        self._take_counts(worker, worker.snapshots)

    def _take_counts(self, worker: Worker, last: dict[str, Any]) -> None:
        if not worker.counted:
            worker.counted = True
            self._past.take(last)

    def _lost(self, slot: Slot, worker: Worker) -> None:
        """It has ended, and nobody has told it to."""
        if self._over.is_set():
            return
        now = asyncio.get_running_loop().time()
        lasted = worker.served and now - worker.served >= LASTING_SECONDS
        slot.failures = 0 if lasted else slot.failures + 1
        slot.restarts += 1
        log.error("%s %s", worker, worker.how_it_ended())
        if not self._said and (worker.status >= 0 or slot.failures >= MOST_FIRST_FAILURES):
            # What is wrong is the same for all, and has been told.
            self._finish(worker.status if worker.status > 0 else FAILED)
            return
        # Connections that come to a socket of nobody's would wait.
        fresh = self._ports.bind()
        slot.sockets.close()
        slot.sockets = fresh

    # --- what they ask ---

    async def _answer(self, worker: Worker, what: str, argument: Any) -> Any:
        if what == "state":
            return [change.fields() for change in self._changes.record.after(argument)]
        if what == "join":
            return [change.fields() for change in self._changes.join(worker, argument)]
        if what == "serving":
            self._serves(worker, argument)
        elif what == "act":
            await self._changes.make(worker, *argument)
        elif what == "reports":
            return await self._reports(*argument)
        elif what == "last words":
            self._take_counts(worker, argument)
        return None

    def _serves(self, worker: Worker, hints: Sequence[str]) -> None:
        worker.served = asyncio.get_running_loop().time()
        worker.serving.set()
        if not self._said:
            self._said = True
            for line in hints:
                self._say(line)
        log.info("%s serves", worker)
        if self._config.worker_timeout:
            self._spawn(self._look_after(worker, self._config.worker_timeout))

    async def _look_after(self, worker: Worker, seconds: float) -> None:
        """Kill it when it stands still: it would keep its share of the connections."""
        with suppress(Gone):
            await stands_still(worker.pid, partial(worker.ask, "alive"), seconds)
            log.error("%s sent no heartbeat for %g s; killing it", worker, seconds)
            worker.kill()

    async def _reports(self, name: str, arguments: Any) -> Any:
        workers = [worker for worker in self._workers if worker.served]
        answers = await asyncio.gather(*(worker.report(name, arguments) for worker in workers))
        pairs = zip(workers, answers, strict=True)
        # Who has ended meanwhile is in the past.
        found = [(worker.number, *said) for worker, said in pairs if not worker.counted]
        return {
            "workers": [[number, report] for number, report, _ in found if report is not None],
            "past": self._past.of(name),
            "up": [number for number, _, now in found if now],
            "restarts": [[slot.number, slot.restarts] for slot in self._slots],
        }

    # --- workers go ---

    def _replace(self, worker: Worker) -> None:
        """It is not as the others are."""
        for slot in self._slots:
            if slot.worker is worker:
                self._spawn(self._renew(slot))

    def _roll(self) -> None:
        """Replace all of them, one after the other."""
        if not (self._rolling or self._over.is_set()):
            self._rolling = True
            self._spawn(self._renew_all())

    async def _renew_all(self) -> None:
        log.info("rolling restart: replacing the workers one by one")
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

    async def _renew(self, slot: Slot) -> bool:
        """Start a worker's successor, and when it serves, have the worker end; whether it does."""
        async with slot.turn:
            old = slot.worker
            successor = await self._start(slot)
            serving = asyncio.create_task(successor.serving.wait())
            ended = asyncio.create_task(successor.ended.wait())
            await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            ended.cancel()
            if self._over.is_set():
                return False
            if not successor.serving.is_set() or successor.ended.is_set():
                log.error("%s, the replacement of %s, %s", successor, old, successor.how_it_ended())
                return False
            slot.worker = successor
            slot.restarts += 1
        if old is not None:
            old.retiring = True
            # From now on it is no part of what there is, but for its calls.
            self._changes.leave(old)
            heard = await notify(old, "retire")
            await self._ended([old], self._timeout(self._config.drain_delay, heard))
        return True

    # --- the end ---

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
        heard = worker.retiring or await notify(worker, self._notice)
        await self._ended([worker], self._timeout(delay, heard))

    def _timeout(self, delay: float, heard: bool) -> float:
        """For the end of a worker that goes on serving for `delay`; seconds."""
        # Who has not heard it may be busy with a call, and does nothing more when it stands still.
        return delay + 2 * self._config.grace + SPARE_SECONDS if heard else self._config.grace

    async def _ended(self, workers: Sequence[Worker], seconds: float) -> None:
        """Wait for their end; who takes longer is killed."""
        ends = [asyncio.create_task(worker.ended.wait()) for worker in workers]
        if not ends:
            return
        await asyncio.wait(ends, timeout=seconds)
        for worker in workers:
            if not worker.ended.is_set():
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


def supervise(config: Config, arguments: Sequence[str], make_loop: Any) -> int:
    """Run the workers of `triglot ARGUMENTS`; the exit status. Raises `OSError`."""
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(_supervise(config, arguments))


async def _supervise(config: Config, arguments: Sequence[str]) -> int:
    return await Supervisor(config, arguments, partial(print, flush=True)).run()
