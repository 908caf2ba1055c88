"""The dynamic batcher (spec 5.1).

Strategy: a batch is formed of queued requests when the executor is idle, so that an unloaded server adds no delay,
and a busy one lets batches grow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from triglot.core.errors import Internal, own_copy
from triglot.core.running import Defer
from triglot.core.statistics import Reading
from triglot.executors.batch import Batch, Joining
from triglot.executors.executor import Executor, Runnable
from triglot.executors.hosted import HostedModel
from triglot.executors.joining import append
from triglot.executors.work import Explain, Function, Inputs, Work
from triglot.model.model import Model
from triglot.scheduling.batch_queue import BatchQueue, NextWork, expired
from triglot.scheduling.forming import Wait, Waiting
from triglot.scheduling.schedule import Later, Timer

log = logging.getLogger(__name__)


class Part(Work):
    """Some rows of a request."""

    __slots__ = ("_unsplit",)

    def __init__(self, unsplit: UnsplitRequest, inputs: Inputs, execution: Work) -> None:
        super().__init__(inputs, execution.call, execution.sink, execution.receiver)
        self._unsplit = unsplit

    def start(self, batch_size: int) -> None:
        """Note the start. On an instance's thread."""
        self._unsplit.started(batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """Note the end.

        On an instance's thread; joining and splitting count as the request's time in the model.
        """
        self._unsplit.on_end()

    def settle(self) -> None:
        """Report to the `UnsplitRequest`."""
        self._unsplit.delivered(self)


class UnsplitRequest:
    """The parts of `execution`, of `size` rows each, which run in any order and on any instances.

    The parts end on threads, where the last one joins their outputs; the first failed part fails the request.
    `deliver` is called once, on the event loop, when all parts are delivered or one has failed.
    """

    def __init__(self, execution: Work, rows: int, size: int, deliver: Callable[[UnsplitRequest], object]) -> None:
        self.execution = execution
        self.parts: Sequence[Part] = [
            Part(self, {name: array[at : at + size] for name, array in execution.inputs.items()}, execution)
            for at in range(0, rows, size)
        ]
        self.pieces = [(part, min(size, rows - at * size)) for at, part in enumerate(self.parts)]
        self._deliver = deliver
        self._lock = threading.Lock()
        self._has_started = False
        self._unended = self._undelivered = len(self.parts)

    def started(self, batch_size: int) -> None:
        """Note that a part starts; the first one starts the request."""
        with self._lock:
            if not self._has_started:
                self._has_started = True
                self.execution.start(batch_size)

    def on_end(self) -> None:
        """Note that a part has ended, with a result or an error; the last one joins the results."""
        with self._lock:
            self._unended -= 1
            last = not self._unended
        if last and all(part.failure is None for part in self.parts):
            try:
                self.execution.result = append([part.result for part in self.parts])
            except Internal as error:
                log.error("%s", error.message)
                self.execution.failure = own_copy(error)
            except Exception:
                log.exception("cannot join the outputs for the parts of a request")
                self.execution.failure = Internal("cannot join the outputs for the parts of the request")

    def delivered(self, part: Part) -> None:
        """Note that a part's outcome has reached the event loop. On the event loop."""
        if not self._undelivered:
            return
        self._undelivered -= 1
        if part.failure is not None:
            self.execution.failure = part.failure
            self._undelivered = 0
        if not self._undelivered:
            self.execution.end()
            self._deliver(self)


EXPIRY_SECONDS = 0.01
"""Requests that expire within this time of each other are rejected together."""


class ArrivalOrder:
    """Delivers a request that is `done` once all that arrived before it are delivered or removed.

    On the event loop.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[Work, bool] = OrderedDict()
        """Requests to deliver, in order of arrival, and whether each is done."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, work: Work) -> None:
        """Add an arriving request."""
        self._pending[work] = False

    def done(self, work: Work) -> None:
        """Mark a request as done, and deliver those whose turn has come."""
        if work in self._pending:
            self._pending[work] = True
            self._deliver()

    def remove(self, work: Work) -> None:
        """Remove a cancelled request; its outcome is not delivered."""
        self._pending.pop(work, None)
        self._deliver()

    def _deliver(self) -> None:
        while self._pending and self._pending[first := next(iter(self._pending))]:
            del self._pending[first]
            first.deliver()


class PendingBatch:
    """A batch that waits to grow."""

    __slots__ = ("_rows", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._rows = wait.rows

    def ends_wait(self, waiting: Waiting) -> bool:
        """Return whether this arriving request may end the wait."""
        wait = self._wait
        self._rows += waiting.rows
        return (
            self._rows >= wait.target
            or waiting.key != wait.key
            or waiting.expires < wait.until
            or waiting.latest_start < wait.until
        )


class UnbatchedWork(Runnable):
    """Work that shares no batch; notifies its `owner` when it has ended."""

    def __init__(self, work: Work, owner: Batcher) -> None:
        self._work = work
        self._owner = owner

    def run(self, function: Function, explain: Explain) -> None:
        """See `Runnable`."""
        self._work.run(function, explain)

    def deliver(self) -> None:
        """See `Runnable`."""
        try:
            self._owner.on_end(self)
        finally:
            self._work.deliver()


class Batcher:
    """A `Schedule` of batches; the `executor` runs up to its capacity at the same time.

    `infer_batch`: the model's function that takes requests as a list, if any. `defer` runs a function later on the
    event loop, `later` after some seconds. A batch whose requests are all cancelled is cancelled where possible.
    Raise `ValueError` for a model without `dynamic_batching`.
    """

    def __init__(
        self,
        model: Model,
        limit: int,
        executor: Executor,
        infer_batch: Callable[..., Any] | None,
        defer: Defer,
        later: Later,
    ) -> None:
        batching = model.dynamic_batching
        if batching is None:
            raise ValueError("dynamic_batching: expected a DynamicBatching, got None")
        self._executor = executor
        self._defer = defer
        self._deferred = False
        self._later = later
        self._expiry: Timer | None = None
        self._expiry_at = inf
        self._queue = BatchQueue(model, batching, limit)
        self._joining = Joining(batching.allowed_sizes, infer_batch, isinstance(model, HostedModel))
        self._order = ArrivalOrder() if batching.preserve_ordering else None
        self._split_requests: dict[Work, UnsplitRequest] = {}
        self._pending_batch: PendingBatch | None = None
        self._wait_over = False
        self._timer: Timer | None = None
        self._running: set[Batch | UnbatchedWork] = set()

    def __len__(self) -> int:
        return len(self._queue)

    # --- arriving and leaving requests ---

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """See `Schedule`. Raise `QueueFull`, `InvalidArgument`, and `Unavailable`, also once closed."""
        rows, key = 1, None
        if work.buffer is None or self._joining.infer_batch is not None:
            rows, key = self._queue.keys.of(work.inputs, work.call)
        unsplit = None
        pieces: Sequence[tuple[Work, int]] = ((work, rows),)
        if rows > self._queue.keys.max_rows and key is not None:
            unsplit = UnsplitRequest(work, rows, self._queue.keys.max_rows, self._deliver_unsplit)
            pieces = unsplit.pieces
        added = self._queue.put(pieces, key)
        if unsplit is not None:
            self._split_requests[unsplit.execution] = unsplit
        if self._order is not None and work.buffer is None:
            self._order.add(work)
        pending = self._pending_batch
        if pending is not None:
            for waiting in added:
                self._wait_over |= pending.ends_wait(waiting)
        if added[0].expires < self._expiry_at:
            self._expire_at(added[0].expires)
        self._form_soon(defer)

    def discard(self, work: Work) -> bool:
        """See `Schedule`."""
        if self._order is not None:
            self._order.remove(work)
        unsplit = self._split_requests.pop(work, None)
        if unsplit is not None:
            was_queued = sum(map(self._queue.discard, unsplit.parts)) == len(unsplit.parts)
        else:
            was_queued = self._queue.discard(work)
        if not was_queued:
            self._defer(self._cancel_abandoned)  # Its caller marks the call as cancelled right after this.
        return was_queued

    def _cancel_abandoned(self) -> None:
        for batch in list(self._running):
            if isinstance(batch, Batch) and batch.abandoned and self._executor.discard(batch):
                batch.deliver()  # It was not started.

    def resized(self) -> None:
        """See `Schedule`."""
        self._wait_over = True
        self._form_soon()

    def close(self) -> None:
        """See `Schedule`."""
        self._queue.closed = True
        if self._expiry is not None:
            self._expiry.cancel()  # It would keep this object alive until it is due.
        self._form_soon()

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of executed batches, by the reason why they were closed."""
        return self._queue.readings()

    # --- batches ---

    def _form_soon(self, defer: Defer | None = None) -> None:
        """Form batches once for all requests that are put in one turn of the event loop."""
        if not self._deferred:
            self._deferred = True
            (defer or self._defer)(self._form_deferred)

    def _form_deferred(self) -> None:
        self._deferred = False
        if self._pending_batch is None or self._wait_over or self._queue.closed:
            self._form()

    def _form(self) -> None:
        self._pending_batch = None
        self._wait_over = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while len(self._running) < self._executor.capacity:
            taken = self._queue.take()
            if taken.refused:
                self._refuse(taken.refused)
            elif taken.works:
                self._start(taken)
            else:
                if taken.wait is not None:
                    self._pending_batch = PendingBatch(taken.wait)
                    self._timer = self._later(max(0.0, taken.wait.until - time.monotonic()), self._form)
                break
        if self._queue.closed and not len(self._queue):
            self._executor.close()

    def _start(self, taken: NextWork) -> None:
        work: Batch | UnbatchedWork
        if taken.batched:
            work = Batch(taken.works, taken.joinable, self._joining, self)
        else:
            work = UnbatchedWork(taken.works[0], self)
        self._running.add(work)
        self._executor.start(work)

    def on_end(self, work: Batch | UnbatchedWork) -> None:
        """Note that work has been executed, and start the next; its outcomes are delivered after this."""
        self._running.remove(work)
        self._form()

    # --- outcomes ---

    def deliver(self, work: Work) -> None:
        """Deliver an outcome, in order of arrival if ordering is preserved."""
        if self._order is not None and work.buffer is None and not isinstance(work, Part):
            self._order.done(work)
        else:
            work.deliver()

    def _deliver_unsplit(self, unsplit: UnsplitRequest) -> None:
        if self._split_requests.pop(unsplit.execution, None) is not None:
            for part in unsplit.parts:  # If one has failed, others may still be queued.
                self._queue.discard(part)
        self.deliver(unsplit.execution)

    def _refuse(self, refused: Sequence[Work]) -> None:
        for work in refused:
            work.refuse(expired())
            self.deliver(work)

    def _expire_at(self, instant: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_at = instant
        self._expiry = self._later(max(0.0, instant - time.monotonic()), self._refuse_expired)

    def _refuse_expired(self) -> None:
        # `_form` rejects expired requests too, but does not run while the executor is busy.
        self._expiry, self._expiry_at = None, inf
        refused, nearest = self._queue.expired()
        self._refuse(refused)
        if nearest < inf and not self._queue.closed:
            self._expire_at(max(nearest, time.monotonic() + EXPIRY_SECONDS))
