"""A loaded version of a model, as its calls see it: what they read of it, its limits, leases and queue.

Strategy: everything here belongs to the event loop, so counting is an addition and needs no lock. A request counts
with the bytes in which it arrived, since its tensors are views of them. Where nothing is held, any request is
admitted: a limit smaller than one request would otherwise never let it through.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, Self

from triglot.core.call import TimerWheel
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import QueueFull, Unavailable, queue_full
from triglot.core.response_buffer import ResponseBuffer
from triglot.core.running import Defer
from triglot.core.statistics import Reading, Statistics
from triglot.executors.executor import Executor
from triglot.executors.work import BEFORE_START, Explain, ResponseTimes, Work, WorkOwner, explained
from triglot.model.ensemble import Ensemble
from triglot.model.model import Model, is_async, is_decoupled, signatures_of
from triglot.model.signature import default_of
from triglot.scheduling.response_cache import ModelCache
from triglot.scheduling.schedule import Schedule
from triglot.scheduling.sequences import SequenceSchedule

# --- admission ---


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on bytes of requests per model, and on the number and bytes of requests of all models.

    0: unlimited.
    """

    model_bytes: int = 0
    total_requests: int = 0
    total_bytes: int = 0


UNLIMITED: Final = Limits()


class Admission:
    """The totals of all models, and the limits; each model version has a `Gate`."""

    __slots__ = ("bytes", "limits", "requests")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.bytes = 0


class Gate:
    """Counts what one model version holds. On the event loop; each `enter` is followed by one `leave`."""

    __slots__ = ("_all", "_bytes", "_max_bytes", "_refused", "_requests")

    def __init__(self, admission: Admission) -> None:
        self._all = admission
        self._max_bytes = admission.limits.model_bytes
        self._requests = 0
        self._bytes = 0
        self._refused = {"max_queue_bytes": 0, "max_total_queue_size": 0, "max_total_queue_bytes": 0}

    def enter(self, size: int) -> None:
        """Admit a request of `size` bytes. Raise `QueueFull` when a limit would be exceeded."""
        everything = self._all
        limits = everything.limits
        if self._requests and 0 < self._max_bytes < self._bytes + size:
            self._refuse("max_queue_bytes", f"the model holds {_bytes(self._bytes, size, self._max_bytes)}")
        if everything.requests:
            if 0 < limits.total_requests <= everything.requests:
                self._refuse(
                    "max_total_queue_size", f"all models hold {everything.requests} requests, the most that"
                )
            if 0 < limits.total_bytes < everything.bytes + size:
                text = f"all models hold {_bytes(everything.bytes, size, limits.total_bytes)}"
                self._refuse("max_total_queue_bytes", text)
        self._requests += 1
        self._bytes += size
        everything.requests += 1
        everything.bytes += size

    def leave(self, size: int) -> None:
        """Release a request of `size` bytes."""
        everything = self._all
        self._requests -= 1
        self._bytes -= size
        everything.requests -= 1
        everything.bytes -= size

    def _refuse(self, option: str, text: str) -> NoReturn:
        self._refused[option] += 1
        raise queue_full(f"{text} {option} allows")

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics: what is held, and rejected requests by limit."""
        yield Reading("held_bytes", "Bytes of the model's queued and running requests.", self._bytes)
        yield Reading("held_requests", "The model's queued and running requests.", self._requests)
        for reason, count in self._refused.items():
            yield refusals(reason, count)


def _bytes(held: int, more: int, limit: int) -> str:
    return f"{held} bytes of requests, {more} more would exceed the {limit} that"


def refusals(reason: str, count: int) -> Reading:
    """Return the metric of requests rejected because of a limit; `reason` is the option that sets the limit."""
    return Reading(
        "requests_refused",
        "Rejected requests, by the limit they exceeded.",
        count,
        {"limit": reason},
        counter=True,
    )


# --- the queue ---


class Queue:
    """A `Schedule`: first in, first out. Requests are held in the executor's own queue, `limit` of them at most.

    `defer` runs a function later on the event loop: all requests of one turn of the loop are started together.
    """

    def __init__(self, limit: int, executor: Executor, defer: Defer) -> None:
        self._limit = limit
        self._executor = executor
        self._defer = defer
        self._closed = False

    def __len__(self) -> int:
        return len(self._executor)

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """See `Schedule`. Raise `QueueFull`, and `Unavailable` once closed."""
        if self._closed:
            raise Unavailable("the model was unloaded")
        self._executor.check_room(self._limit)
        self._executor.start(work, defer or self._defer)

    def discard(self, work: Work) -> bool:
        """See `Schedule`."""
        return self._executor.discard(work)

    def resized(self) -> None:
        """See `Schedule`. Nothing to do: instances take requests themselves."""

    def close(self) -> None:
        """See `Schedule`."""
        self._closed = True
        self._executor.close()

    def readings(self) -> Iterator[Reading]:
        """No metrics of its own: queued requests are counted for every schedule."""
        return iter(())


# --- the loaded version ---


@mypyc_attr(allow_interpreted_subclasses=True)
class LoadedVersion(WorkOwner):
    """What calls read of one version of a model, which is loaded already, and the only way to it, `submit`.

    `name` and `version` identify it. `max_unread_bytes`: of a call's responses, see `ResponseBuffer`. `debug`: see
    `explained`. Blocking `infer` runs on the threads of the instances, `async def infer` on the event loop
    (`on_loop`).
    """

    _schedule: Schedule
    sequences: SequenceSchedule | None
    _joins_streams: bool
    """Whether a streaming call can be queued like any other: the model cannot send more than one response."""

    def __init__(
        self,
        name: str,
        version: int,
        model: Model,
        loop: asyncio.AbstractEventLoop,
        max_unread_bytes: int,
        *,
        debug: bool,
    ) -> None:
        self.name = name
        self.version = version
        self.model = model
        self.signatures = signatures_of(model)
        self.default_signature = default_of(self.signatures)
        self.signature = self.signatures[self.default_signature]
        self.any_output_shapes = model.any_output_shapes
        self.on_loop = is_async(model.infer)
        self.decoupled = is_decoupled(model.infer)
        batching = model.dynamic_batching
        self.statistics = Statistics(
            batched=bool(model.max_batch_size or (batching is not None and batching.max_batch_size)),
            composed=isinstance(model, Ensemble),
        )
        """Statistics since it was loaded."""
        self.response_cache: ModelCache | None = None
        self._loop = loop
        self._timers = TimerWheel(loop)
        self._max_unread_bytes = max_unread_bytes
        # A function, not a bound method: the threads would keep the servable alive.
        self._explain: Explain = partial(explained, str(self), debug=debug)
        self._gate: Gate | None = None
        self._queue_full = 0
        self._leases = 0
        self._at_rest: asyncio.Event | None = None
        self._drains = False
        self._idle = threading.Event()

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"

    def why_unservable(self, signature_name: str) -> str:
        """Return what to add to the error for a signature that the model's file has and that cannot be called."""
        why = self.model.unservable_signatures.get(signature_name, "")
        return f" (it is in the model's file, but {why})" if why else ""

    # --- leases ---

    @property
    def leases(self) -> int:
        """Calls that hold a lease on this version."""
        return self._leases

    @property
    def drains(self) -> bool:
        """Whether it is being unloaded, and takes no new leases."""
        return self._drains

    def __enter__(self) -> Self:
        """Take a lease: the version stays loaded until `__exit__`."""
        self._leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._leases -= 1
        if self._at_rest is not None and not self._leases:
            self._at_rest.set()
            if self._drains:
                self._idle.set()

    # --- calls ---

    def submit(self, work: Work) -> None:
        """Run `work`: the only way to the model.

        Blocking code runs on a thread, and other code on the event loop; a plain function may also send responses
        to a call that streams with `call.respond`. It ends, or is dropped if it is cancelled, before this returns
        or later: with `QueueFull`, `DeadlineExceeded`, the model's own `ServingError`, or `Internal`. It ends at
        its deadline even if the model still runs; code on the event loop is cancelled then, and awaited.
        """
        call = work.call
        work.owner = self
        if not work.leased:
            work.holds_lease = True
            self._leases += 1
        try:
            if work.streams:
                self._prepare_stream(work)
            if call.size and self._gate is not None:
                self._gate.enter(call.size)
                work.holds_gate = True
            if call.expired:
                raise call.overdue(BEFORE_START)
            self._put(work)
            if call.deadline is not None:
                work.expires = self._timers.add(work, call.deadline)
        except BaseException as error:
            work.fail(self._explain(error))

    def _prepare_stream(self, work: Work) -> None:
        """Let the model send more than one response, if it can."""
        if self.decoupled:
            work.times = ResponseTimes(work.call)
        if self.on_loop:
            work.iterates = self.decoupled
        elif not self._joins_streams:
            work.buffer = ResponseBuffer(work.call, self._max_unread_bytes, self._loop, work.pump)
            work.queue = self._schedule
            work.call.outlet = work

    def _put(self, work: Work) -> None:
        work.queued = now = time.perf_counter()  # Before a thread takes it.
        try:
            self._schedule.put(work, work.defer)
        except QueueFull as error:
            self._queue_full += 1
            text = f"{error.message}, the most that max_queue_size allows"
            raise QueueFull(text, retry_after=error.retry_after) from None
        work.call.queued = now

    def finish(self, work: Work) -> None:
        """See `WorkOwner`."""
        if work.expires:
            self._timers.discard(work, work.expires)
        if work.holds_gate and self._gate is not None:
            self._gate.leave(work.call.size)
        if work.holds_lease:
            self.__exit__()

    def discard(self, work: Work) -> bool:
        """See `WorkOwner`."""
        return self._schedule.discard(work)
