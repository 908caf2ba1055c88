"""Chooses the executors and the schedule of a model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence

from triglot.executors.executor import Executor
from triglot.executors.hosted import HostedModel, calls_per_instance
from triglot.executors.loop import LoopExecutor
from triglot.executors.loop_guard import LoopGuard, guarded_list
from triglot.executors.thread import ThreadExecutor
from triglot.executors.work import Explain, Function
from triglot.model.config import EXECUTIONS
from triglot.model.model import Model, is_async, is_decoupled
from triglot.scheduling.batcher import Batcher
from triglot.scheduling.queue import Queue
from triglot.scheduling.schedule import Schedule
from triglot.scheduling.sequences import SequenceSchedule

EXECUTORS: Mapping[str, Callable[..., Executor]] = dict.fromkeys(EXECUTIONS, ThreadExecutor)
"""What runs a plain `infer`, by `Model.execution`.

A model in processes is called by threads that wait for them.
"""


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
