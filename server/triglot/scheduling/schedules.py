"""Which executors and which schedule a model asks for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from triglot.executors.executor import Executor
from triglot.executors.hosted import HostedModel
from triglot.executors.loop import LoopExecutor
from triglot.executors.loop_guard import LoopGuard, guarded_list
from triglot.executors.thread import ThreadExecutor
from triglot.executors.work import Explain, Function
from triglot.model.model import Model, is_async, is_decoupled
from triglot.scheduling.batcher import Batcher
from triglot.scheduling.queue import Queue
from triglot.scheduling.schedule import Schedule
from triglot.scheduling.sequences import SequenceSchedule


def executors_for(model: Model, name: str, function: Function, explain: Explain) -> Sequence[Executor]:
    """The loop for `async def` code, else threads: one for each instance, all of them as one executor unless what
    runs on which matters."""
    loop = asyncio.get_running_loop()
    if is_async(model.infer):
        orphaned = (lambda: model.orphaned) if isinstance(model, HostedModel) else int
        return [LoopExecutor(loop, function, explain, model.instances, orphaned)]
    names = (f"{name}#{number}" for number in itertools.count())
    if model.sequence_batching is None:
        return [ThreadExecutor(names, model.instances, function, explain, loop, model.end_instance)]
    return [ThreadExecutor(names, 1, function, explain, loop, model.end_instance) for _ in range(model.instances)]


def executor_for_sequences(model: Model, name: str, function: Function, explain: Explain) -> Executor:
    """For an instance that comes later."""
    loop = asyncio.get_running_loop()
    return ThreadExecutor(iter([name]), 0, function, explain, loop, model.end_instance)


def schedule_for(model: Model, limit: int, executors: Sequence[Executor], guard: LoopGuard) -> Schedule:
    """The schedule that a model asks for. Raises `ValueError` for what the model cannot have."""
    loop = asyncio.get_running_loop()
    if model.sequence_batching is not None:
        return SequenceSchedule(model, limit, executors, loop.call_soon, loop.call_later)
    (executor,) = executors
    if model.dynamic_batching is not None and not (is_async(model.infer) and is_decoupled(model.infer)):
        return Batcher(model, limit, executor, guarded_list(model, guard), loop.call_soon, loop.call_later)
    return Queue(limit, executor, loop.call_soon)
