"""The dynamic batcher of models whose instances are threads (spec 5.1).

Strategy: work is pulled. An idle instance forms a batch of what waits, so an unloaded server adds no delay and a
busy one lets batches grow. One instance at a time forms: it has the turn while it decides, and while it waits for
a batch to grow. The other idle ones are parked, and whoever leaves with a batch calls the next one when more
waits. The loop never waits for a lock.
"""

from __future__ import annotations

import threading
import time

from triglot.core.running import Defer
from triglot.executors.joining import buffers_for
from triglot.executors.parking import Parking
from triglot.executors.work import Work
from triglot.model.model import Model
from triglot.scheduling.batch_schedule import BatchSchedule, Growing
from triglot.scheduling.forming import Wait
from triglot.scheduling.queue import Grow, Later, no_growth
from triglot.scheduling.waiting import Taken


class Batcher(BatchSchedule):
    """A `Schedule` that gives each instance a batch. Raises as `BatchSchedule`.

    `defer` runs a function a little later on the loop, `later` in so many seconds. `grow` is told how many more
    instances would have had something to do.
    """

    def __init__(self, model: Model, limit: int, defer: Defer, grow: Grow, later: Later) -> None:
        super().__init__(model, limit, defer, later)
        self._grow = grow
        self._parked = Parking()
        self._turn = threading.Lock()
        self._bell = threading.Lock()  # Released to wake whoever has the turn.
        self._bell.acquire()
        self._buffers = [buffers_for(model) for _ in range(model.instances)]

    def take(self, instance: int) -> Work | None:
        """What the instance of this number runs next, waiting for it; None once closed and empty."""
        while True:
            # Nobody waits with the turn once this is closed.
            if self._turn.acquire(blocking=self._room.closed):
                try:
                    taken = self._form()
                finally:
                    self._turn.release()
                if taken.refused or taken.works:
                    if len(self._room):
                        self._parked.call(1)
                    return self._next(taken, self._buffers[instance])
                if self._room.closed:
                    return None
            self._parked.wait(unless=self._may_form)

    def _may_form(self) -> bool:
        return self._room.closed or (len(self._room) > 0 and not self._turn.locked())

    def _form(self) -> Taken:
        """With the turn: what is to run, once it is; nothing when nothing waits."""
        while True:
            taken = self._room.take()
            if taken.refused or taken.works or taken.wait is None:
                return taken
            self._let_grow(taken.wait)

    def _let_grow(self, wait: Wait) -> None:
        self._bell.acquire(blocking=False)  # It may have been rung for an earlier batch.
        self._growing = Growing(wait)
        # What came before that was not compared with it.
        if not self._room.arrived and not self._room.closed:
            self._bell.acquire(timeout=max(0.0, wait.until - time.monotonic()))
        self._growing = None

    # --- on the loop ---

    def _come_by(self) -> None:
        self._deferred = False
        if self._has_grown:
            self._has_grown = False
            self._ring()
        # What waits comes first: whoever takes some of it from here on is idle no more.
        batches, idle, forming = self._room.batches, len(self._parked), self._turn.locked()
        if not forming and len(self._room):
            self._parked.call(1)
        if (wanted := batches - idle - forming) > 0:
            self._grow(wanted)

    def _ring(self) -> None:
        if self._bell.locked():
            self._bell.release()

    def discard(self, work: Work) -> bool:
        """Take `work` out again, for nobody waits for it; False when an instance has it already."""
        there = super().discard(work)
        if self._room.crowded and self._turn.acquire(blocking=False):
            try:
                self._room.sweep()
            finally:
                self._turn.release()
            self._come_by_soon()  # An instance may have found the turn taken.
        return there

    def close(self) -> None:
        """Let the instances finish what waits, and then end."""
        super().close()
        self._grow = no_growth  # Whom it belongs to would live as long as this.
        self._ring()
        self._parked.call_all()
