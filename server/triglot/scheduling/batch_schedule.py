"""What schedules that join requests have in common, wherever the batches run (spec 5.1)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import inf
from typing import cast

from triglot.core.buffers import Buffers
from triglot.core.readings import Reading
from triglot.core.running import Defer
from triglot.executors.batch import Batch, Joining, Refusal
from triglot.executors.stream import Stream
from triglot.executors.work import Execution, InstanceExecution, Work
from triglot.model.model import Model
from triglot.scheduling.forming import Wait, Waiting
from triglot.scheduling.ordering import ArrivalOrder
from triglot.scheduling.parts import Part, Whole
from triglot.scheduling.queue import Later, Timer
from triglot.scheduling.waiting import REQUESTS, Taken, WaitingRoom, expired

EXPIRY_SECONDS = 0.01
"""Requests that expire within so long are refused together."""


class Growing:
    """A batch that an idle instance waits for to grow. On the loop."""

    __slots__ = ("_rows", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._rows = wait.rows

    def is_changed_by(self, one: Waiting) -> bool:
        """Whether the waiting may be over now that this request is there, too."""
        wait = self._wait
        self._rows += one.rows
        return (
            self._rows >= wait.target or one.key != wait.key or one.expires < wait.until or one.hurry < wait.until
        )


class BatchSchedule(ABC):
    """Everything but who forms the batches, which `_come_by` sees to; belongs to the loop but for `_next`.

    Raises `ValueError` for a model without `dynamic_batching`.
    """

    def __init__(self, model: Model, limit: int, defer: Defer, later: Later) -> None:
        batching = model.dynamic_batching
        if batching is None:
            raise ValueError("dynamic_batching: expected a DynamicBatching, got None")
        self._defer = defer
        self._deferred = False
        self._later = later
        self._expiry: Timer | None = None
        self._expiry_at = inf
        self._room = WaitingRoom(model, batching, limit)
        self._joining = Joining(batching.allowed_sizes, model.infer_batch)
        self._order = ArrivalOrder() if batching.preserve_ordering else None
        self._wholes: dict[Execution, Whole] = {}
        self._growing: Growing | None = None
        self._has_grown = False

    @property
    def limit(self) -> int:
        """Requests that may wait."""
        return self._room.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._room.limit = limit

    def __len__(self) -> int:
        return len(self._room)

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """See `Schedule`. Raises `QueueFull`, `InvalidArgument`, and `Unavailable`, also once closed."""
        plain = isinstance(work, Execution) and not isinstance(work, InstanceExecution)
        rows, key = 1, None
        if plain or (isinstance(work, Stream) and self._joining.infer_batch is not None):
            assert isinstance(work, REQUESTS)
            rows, key = self._room.kinds.of(work.inputs, work.call)
        whole = None
        pieces: Sequence[tuple[Work, int]] = ((work, rows),)
        if rows > self._room.kinds.max_rows and key is not None:
            assert isinstance(work, Execution)
            whole = Whole(work, rows, self._room.kinds.max_rows, self._deliver_whole)
            pieces = whole.pieces
        added = self._room.put(pieces, key)
        if whole is not None:
            self._wholes[whole.execution] = whole
        if self._order is not None and plain:
            assert isinstance(work, Execution)
            self._order.came(work)
        growing = self._growing
        if growing is not None:
            for one in added:
                self._has_grown |= growing.is_changed_by(one)
        if added[0].expires < self._expiry_at:
            self._expire_at(added[0].expires)
        self._come_by_soon(defer)

    def _come_by_soon(self, defer: Defer | None = None) -> None:
        """Once for all that one turn of the loop puts."""
        if not self._deferred:
            self._deferred = True
            (defer or self._defer)(self._come_by)

    @abstractmethod
    def _come_by(self) -> None:
        """Have what waits looked at by whoever forms batches."""

    def discard(self, work: Work) -> bool:
        """Take `work` out again, for nobody waits for it; False when an instance has it already."""
        if self._order is not None and isinstance(work, Execution):
            self._order.give_up(work)
        whole = self._wholes.pop(work, None) if isinstance(work, Execution) else None
        if whole is not None:
            return sum(map(self._room.discard, whole.parts)) == len(whole.parts)
        return self._room.discard(work)

    def _expire_at(self, instant: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_at = instant
        self._expiry = self._later(max(0.0, instant - time.monotonic()), self._refuse_expired)

    def _refuse_expired(self) -> None:
        # An idle instance does so, too; while all are busy, nobody else would.
        self._expiry, self._expiry_at = None, inf
        refused, nearest = self._room.expired()
        Refusal([(work, expired()) for work in refused], self).deliver()
        if nearest < inf and not self._room.closed:
            self._expire_at(max(nearest, time.monotonic() + EXPIRY_SECONDS))

    def close(self) -> None:
        """Let the instances finish what waits, and then end."""
        self._room.closed = True
        if self._expiry is not None:
            self._expiry.cancel()  # It would keep this until it is due.

    def readings(self) -> Iterator[Reading]:
        """What was executed, and why batches were closed."""
        return self._room.readings()

    # --- whoever forms a batch ---

    def _next(self, taken: Taken, buffers: Buffers | None) -> Work:
        """What was taken, as work."""
        if taken.refused:
            return Refusal([(work, expired()) for work in taken.refused], self)
        if not taken.batched:
            return taken.works[0]
        members = cast("list[Execution | Stream]", taken.works)  # What is batched is nothing else.
        return Batch(members, taken.joinable, self._joining, buffers, self)

    # --- what comes back, on the loop ---

    def deliver(self, work: Execution) -> None:
        """Its outcome may leave, in its turn."""
        if self._order is not None and not isinstance(work, Part):
            self._order.done(work)
        else:
            work.deliver()

    def _deliver_whole(self, whole: Whole) -> None:
        if self._wholes.pop(whole.execution, None) is not None:
            for part in whole.parts:  # Where one has failed, the others may wait still.
                self._room.discard(part)
        self.deliver(whole.execution)
