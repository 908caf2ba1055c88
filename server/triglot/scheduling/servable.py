"""`Servable`: a loaded version of a model, with its schedule and executors, from its load to its unload."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.core.statistics import Reading
from triglot.executors.declarations import check_declarations, looks_at_call
from triglot.executors.executor import Executor
from triglot.executors.hosted import HostedModel, calls_per_instance
from triglot.executors.instances import run_on_every
from triglot.executors.loop import LoopExecutor
from triglot.executors.loop_guard import LoopGuard, guard_of, guarded_function, guarded_list
from triglot.executors.thread import ThreadExecutor
from triglot.executors.work import Explain, Function, Hook, Inputs
from triglot.model.config import EXECUTIONS
from triglot.model.model import Model, is_async, is_decoupled
from triglot.scheduling.batcher import Batcher
from triglot.scheduling.loaded_version import Admission, Gate, LoadedVersion, Queue, refusals
from triglot.scheduling.response_cache import ResponseCache
from triglot.scheduling.schedule import Schedule
from triglot.scheduling.sequences import SequenceSchedule

log = logging.getLogger(__name__)


EXECUTORS: Mapping[str, Callable[..., Executor]] = dict.fromkeys(EXECUTIONS, ThreadExecutor)
"""What runs a plain `infer`, by `Model.execution`.

A model in processes is called by threads that wait for them.
"""


# --- executors and schedules ---


def executors_for(
    model: Model, name: str, function: Function, explain: Explain, loop: asyncio.AbstractEventLoop
) -> Sequence[Executor]:
    """Return the model's executors, which are to be opened on the `loop`.

    An `async def infer` runs on the event loop. Others run on one of `EXECUTORS` for all instances, or, for models
    with sequences, on one per instance, since a sequence needs the same instance.
    """
    if is_async(model.infer):
        orphaned = (lambda: model.orphaned) if isinstance(model, HostedModel) else int
        return [LoopExecutor(loop, function, explain, model.instances, orphaned)]
    names = (f"{name}#{number}" for number in itertools.count())
    make = EXECUTORS[model.execution]
    if model.sequence_batching is None:
        threads = model.instances * calls_per_instance(model)
        return [make(names, threads, function, explain, loop, model.end_instance)]
    return [make(names, 1, function, explain, loop, model.end_instance) for _ in range(model.instances)]


def executor_for_sequences(model: Model, name: str, function: Function, explain: Explain) -> Executor:
    """Return the executor of an instance that is added later to a model with sequences."""
    loop = asyncio.get_running_loop()
    return EXECUTORS[model.execution](iter([name]), 0, function, explain, loop, model.end_instance)


def schedule_for(
    model: Model, limit: int, executors: Sequence[Executor], guard: LoopGuard, loop: asyncio.AbstractEventLoop
) -> Schedule:
    """Return the schedule for a model's options, to be used on the `loop`.

    Raise `ValueError` for options that the model cannot have.
    """
    if model.sequence_batching is not None:
        return SequenceSchedule(model, limit, executors, loop.call_soon, loop.call_later, loop=loop)
    (executor,) = executors
    if model.dynamic_batching is not None and not (is_async(model.infer) and is_decoupled(model.infer)):
        return Batcher(model, limit, executor, guarded_list(model, guard), loop.call_soon, loop.call_later)
    return Queue(limit, executor, loop.call_soon)


# --- the loaded version ---


class Servable(LoadedVersion):
    """A loaded version of a model, with its executors. Used and closed on the event loop.

    Made on the loop it is open. Made on another thread, as that may take long, for the `loop`, it is to be opened
    there.

    `name` and `version` identify it. `max_queue_size`: most queued requests, unless the model sets its own
    limit. `max_unread_bytes`: of a call's responses, see `ResponseBuffer`. Blocking `infer` runs on the threads of
    the instances, `async def infer` on the event loop (`on_loop`). A request that is cancelled before it starts is
    never run.
    """

    load_seconds = 0.0
    load_bytes = 0
    """Bytes by which the resident memory of this process grew when it was loaded."""
    half_changed = False
    """Whether a change of the number of instances was abandoned half-way."""
    companion: asyncio.Task[None] | None = None
    """Tasks that run as long as it is loaded."""

    def __init__(
        self,
        name: str,
        version: int,
        model: Model,
        *,
        max_queue_size: int,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        debug: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        check_declarations(model)
        super().__init__(name, version, model, loop or asyncio.get_running_loop(), max_unread_bytes, debug=debug)
        self._hosted = model if isinstance(model, HostedModel) else None
        self.platform = model.platform
        self.guard = guard_of(model, f"{name} version {version}")
        self.function = guarded_function(model, self.guard)
        self._limit = max_queue_size if model.max_queue_size is None else model.max_queue_size
        joins = model.dynamic_batching is not None and not self.decoupled
        self.direct = self.on_loop and not joins
        """Whether requests bypass the queue for instances: each runs at once, as a coroutine of its own."""
        self._joins_streams = joins and (self.on_loop or not looks_at_call(model))
        self._executors = list(executors_for(model, f"{name}/{version}", self.function, self._explain, self._loop))
        self._retiring: set[asyncio.Task[None]] = set()
        self._schedule = schedule_for(model, self._limit, self._executors, self.guard, self._loop)
        self.sequences = self._schedule if isinstance(self._schedule, SequenceSchedule) else None
        if self.sequences is not None:
            self.sequences.lease = self
        self.preparations: list[Callable[[Function], object]] = []
        """Called with the model's function by each instance that is added later, on its thread, before it
        serves.
        """
        self.resizing = asyncio.Lock()
        """Held by who changes its instances."""
        self.loaded_from: object = None
        """Keeps the files alive that it was loaded from, where these are temporary."""
        self._readiness = None if model.check_ready is None else Readiness(str(self), model.check_ready)
        self.labels: Mapping[str, Sequence[bytes]] = model.labels
        """Class names per output, for outputs that have labels."""
        if loop is None:
            self.open()

    def open(self) -> None:
        """Start the executors; once, before anything else."""
        for executor in self._executors:  # Only now that the model's configuration is known to be valid.
            executor.open()

    @property
    def alive(self) -> bool:
        """Whether an instance is alive to run the next request."""
        if self._hosted is not None and not self._hosted.alive:
            return False
        return any(executor.alive for executor in self._executors)

    async def check_ready(self) -> bool:
        """Return whether the model's own readiness check passes; True without one."""
        return self._readiness is None or await self._readiness.ask()

    @property
    def queue_depth(self) -> int:
        """Queued requests, those in a queue of the model's own among them."""
        return len(self._schedule) + self.model.queued_requests()

    @property
    def nodes(self) -> Sequence[str]:
        """Where its instances run, one for each, where that can be another machine."""
        return () if self._hosted is None else self._hosted.nodes

    @property
    def instances(self) -> int:
        """How many there are."""
        return sum([executor.capacity for executor in self._executors]) // calls_per_instance(self.model)

    @property
    def busy(self) -> int:
        """How many of them execute a request or a batch."""
        return min(self.instances, sum([executor.busy for executor in self._executors]))

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of its schedule, executors, limits and response cache."""
        if not self.direct:
            yield Reading("instances", "Instances of the model.", self.instances)
            yield Reading("instances_busy", "Instances that execute a request or a batch.", self.busy)
        yield from self._schedule.readings()
        for name, counts in self.model.own_batches.items():
            yield from counts.readings({"dag_model": name})
        yield refusals("max_queue_size", self._queue_full)
        if self._hosted is not None:
            yield from self._hosted.readings()
        if self._gate is not None:
            yield from self._gate.readings()
        if self.response_cache is not None:
            yield from self.response_cache.readings()
        yield from self.guard.readings()

    def stream_from(self, function: Function) -> None:
        """Make it decoupled, before it takes calls: `function` yields the responses, in place of `infer`."""
        self.function, self.decoupled, self._joins_streams = function, True, False
        (executor,) = self._executors
        assert isinstance(executor, LoopExecutor)  # Only ensembles learn of it when their models are known.
        executor.function = function

    def bound(self, admission: Admission) -> None:
        """Enforce the limits of `admission` for requests from now on."""
        self._gate = Gate(admission)

    def enable_response_cache(self, cache: ResponseCache) -> None:
        """Cache the responses to equal requests; ignored, with a warning, for decoupled models and sequences."""
        if self.decoupled or self.model.sequence_batching is not None:
            log.warning("%s: response_cache: ignored for decoupled models and sequences", self)
        else:
            self.response_cache = cache.for_model(ordered=self.model.any_tensors)

    async def resize(self, added: int, removed: int) -> Sequence[BaseException]:
        """Add `added` instances, prepared by `preparations`, then remove `removed` instances once these are idle.

        Return the errors of instances that could not be added; in that case none is removed.
        """
        if self.sequences is not None:
            return await self._resize_sequences(self.sequences, added, removed)
        (executor,) = self._executors
        each = calls_per_instance(self.model)
        errors = await executor.add(added * each, self._prepare)
        self._schedule.resized()
        if not errors:
            await executor.remove(removed * each)
        return errors

    async def _resize_sequences(
        self, schedule: SequenceSchedule, added: int, removed: int
    ) -> Sequence[BaseException]:
        """As `resize`, but does not wait for removed instances: their sequences may take long."""
        errors: list[BaseException] = []
        for number in range(added):
            name = f"{self.name}/{self.version}#{self.model.instances - added + number}"
            executor = executor_for_sequences(self.model, name, self.function, self._explain)
            executor.open()
            if failed := await executor.add(1, self._prepare):
                errors += failed
                executor.close()
            else:
                self._executors.append(executor)
                schedule.add(executor)
        for _ in range(0 if errors else removed):
            retiring = asyncio.create_task(self._retire(schedule))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        return errors

    async def _retire(self, schedule: SequenceSchedule) -> None:
        executor = await schedule.remove()
        await executor.remove(1)
        executor.close()
        self._executors.remove(executor)
        await asyncio.to_thread(executor.join)

    def _prepare(self, function: Function) -> None:
        for prepare in self.preparations:
            prepare(function)

    async def on_every_instance(self, inputs: Inputs, hook: Hook, explain: Explain) -> None:
        """Have `hook` run the model once on each instance; see `run_on_every`."""
        await run_on_every(self._executors, inputs, hook, explain, self._loop)

    async def close(self, *, at_once: bool = False) -> None:
        """End the instances and unload the model; transports send no more calls.

        Does not wait for a model that still runs (see `unload`); with `at_once` neither for its code on the
        event loop, which nothing will run any longer.
        """
        self._schedule.close()
        self.preparations.clear()  # They refer to this servable.
        for task in (*self._retiring, self.companion):
            if task is not None:
                task.cancel()
        if self.response_cache is not None:
            self.response_cache.close()
        self.end_leases(at_once=at_once)
        await unload(self.model, str(self), self._wait_until_idle)

    def _wait_until_idle(self) -> None:
        """Block until nothing runs. On another thread."""
        for executor in self._executors:
            executor.join()
        if self.on_loop:
            self.wait_idle()

    # --- leases ---

    async def drained(self) -> None:
        """Wait until no lease is held; no new ones are taken."""
        self._drains = True
        await self.at_rest()

    async def at_rest(self) -> None:
        """Wait until no lease is held."""
        if self._leases:
            if self._at_rest is None or self._at_rest.is_set():
                self._at_rest = asyncio.Event()
            await self._at_rest.wait()

    def end_leases(self, *, at_once: bool) -> None:
        """Declare that no new lease is taken. `at_once`: do not wait for those that are held."""
        self._drains, self._at_rest = True, self._at_rest or asyncio.Event()
        if at_once or not self._leases:
            self._idle.set()

    def wait_idle(self) -> None:
        """Block, on another thread and after `end_leases`, until the last lease has been released."""
        self._idle.wait()


CHECK_SECONDS = 5.0


class Readiness:
    """Runs `check` on a thread; concurrent callers share one run. On the event loop.

    A check that takes longer than `seconds` counts as not ready; its thread is not stopped.
    """

    def __init__(self, name: str, check: Callable[[], bool], seconds: float = CHECK_SECONDS) -> None:
        self._name = name
        self._check = check
        self._seconds = seconds
        self._running: asyncio.Future[bool] | None = None

    async def ask(self) -> bool:
        """Return whether the check passes."""
        if self._running is None:
            loop = asyncio.get_running_loop()
            self._running = loop.create_future()
            # A daemon: a check that never returns must not keep a stopped server alive.
            threading.Thread(target=self._run, args=(loop,), name=f"{self._name} ready", daemon=True).start()
        running = self._running
        await asyncio.wait([running], timeout=self._seconds)
        if not running.done():
            log.warning("%s: the readiness check takes longer than %g s", self._name, self._seconds)
        return running.done() and running.result()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        ready = False
        try:
            ready = self._check()
        except BaseException:  # A model that calls exit() is not ready either.
            log.exception("%s: the readiness check failed", self._name)
        with suppress(RuntimeError):  # The server has stopped.
            loop.call_soon_threadsafe(self._on_end, ready)

    def _on_end(self, ready: bool) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.set_result(ready)


UNLOAD_PATIENCE_SECONDS = 2.0


async def unload(model: Model, name: str, at_rest: Callable[[], object]) -> None:
    """Close the model once `at_rest`, which blocks while the model runs, has returned.

    Waits `UNLOAD_PATIENCE_SECONDS`, and for a `HostedModel`, whose processes are ended then, as long again. After
    that the model is closed in the background, when its last call has ended.
    """
    unloaded: Future[None] = Future()
    held = [(model, at_rest)]

    def close() -> None:
        held[0][1]()
        try:
            held[0][0].close()
        except BaseException:  # A model that calls exit() would otherwise seem to be running still.
            log.exception("%s failed to close", name)
        held.clear()  # This thread may outlive the future's result for a moment.
        # The future is cancelled if `unload` has stopped waiting.
        if unloaded.set_running_or_notify_cancel():
            unloaded.set_result(None)

    # A daemon, like the instances' threads: a model that never returns must not keep a stopped server alive.
    threading.Thread(target=close, daemon=True).start()
    waiting = asyncio.wrap_future(unloaded)
    await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
    if not waiting.done() and isinstance(model, HostedModel):
        model.abandon()
        await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
    if not waiting.done():
        waiting.cancel()
        log.warning("%s still runs; the server does not wait for it", name)
