"""Which schedule a model asks for."""

from __future__ import annotations

import asyncio

from triglot.core.running import Defer
from triglot.executors.schedule import Schedule
from triglot.executors.work import Work
from triglot.model.model import Model
from triglot.scheduling.batcher import Batcher
from triglot.scheduling.queue import Grow, WorkQueue
from triglot.scheduling.sequences import SequenceSchedule


def schedule_for(model: Model, limit: int, defer: Defer, grow: Grow) -> Schedule:
    """The schedule that a model asks for. Raises `ValueError` for what the model cannot have."""
    if model.sequence_batching is not None:
        return SequenceSchedule(model, limit, defer, grow, asyncio.get_running_loop().call_later)
    if model.dynamic_batching is not None:
        return Batcher(model, limit, defer, grow, asyncio.get_running_loop().call_later)
    return WorkQueue[Work](limit, defer, grow)
