"""The dynamic batcher of models whose code runs on the loop: so are batches formed, and run, there (spec 5.1)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from triglot.executors.batch import Batch
from triglot.executors.joining import buffers_for
from triglot.executors.loop_guard import LoopGuard, guarded_list
from triglot.executors.work import Explain, Function, Work
from triglot.model.model import Model
from triglot.scheduling.batch_schedule import BatchSchedule, Growing


class LoopBatcher(BatchSchedule):
    """A `Schedule` that runs its batches by itself, as many at the same time as the model has instances.

    A batch that nobody waits for any more is cancelled. `guard` watches a model's own code. Raises as
    `BatchSchedule`.
    """

    def __init__(
        self,
        model: Model,
        limit: int,
        loop: asyncio.AbstractEventLoop,
        function: Function,
        explain: Explain,
        guard: LoopGuard,
    ) -> None:
        super().__init__(model, limit, loop.call_soon, loop.call_later)
        self._joining = replace(self._joining, infer_batch=guarded_list(model, guard))
        self._loop = loop
        self._function = function
        self._explain = explain
        self._most = model.instances
        self._buffers = buffers_for(model)
        self._running: dict[asyncio.Task[None], Batch] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, instance: int) -> Work | None:
        """Nothing: no thread runs such a model."""
        return None

    def _come_by(self) -> None:
        self._deferred = False
        if self._growing is None or self._has_grown or self._room.closed:
            self._form()

    def _form(self) -> None:
        self._growing = None
        self._has_grown = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while len(self._running) < self._most:
            taken = self._room.take()
            if not taken.refused and not taken.works:
                if taken.wait is not None:
                    self._growing = Growing(taken.wait)
                    later = max(0.0, taken.wait.until - time.monotonic())
                    self._timer = self._loop.call_later(later, self._form)
                break
            work = self._next(taken, self._buffers)
            if isinstance(work, Batch):
                task = self._loop.create_task(work.run_on_loop(self._function, self._explain))
                self._running[task] = work
                task.add_done_callback(self._ended)
            else:
                work.deliver()

    def _ended(self, task: asyncio.Task[None]) -> None:
        batch = self._running.pop(task)
        try:
            batch.deliver()
        finally:
            self._form()

    def discard(self, work: Work) -> bool:
        """Take `work` out again, for nobody waits for it; False when it runs already."""
        there = super().discard(work)
        if not there:
            # Its caller is about to say that it is gone.
            self._loop.call_soon(self._cancel_abandoned)
        elif self._room.crowded:
            self._room.sweep()
        return there

    def _cancel_abandoned(self) -> None:
        for task, batch in self._running.items():
            if batch.abandoned:
                task.cancel()

    def close(self) -> None:
        """Let what waits be run, and no more."""
        super().close()
        self._come_by_soon()
