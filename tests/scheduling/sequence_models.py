"""Models of sequences, and a schedule that the test drives by hand, with a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.direct_work import FutureWork, direct_infer
from tests.scheduling.held_executor import HeldExecutor
from tests.scheduling.scripted_models import Inputs
from triglot import Call, Model, TensorSpec
from triglot.core.errors import ServingError, as_serving_error
from triglot.core.request_scheduling import Scheduling
from triglot.model.scheduling import ControlInput, SequenceBatching, SequenceState
from triglot.scheduling.sequences import SequenceSchedule
from triglot.scheduling.sequences.batch import SequenceBatch
from triglot.scheduling.servable import Servable

CONTROLS = (
    ControlInput("start", "START", "INT32"),
    ControlInput("ready", "READY", "BOOL"),
    ControlInput("end", "END", "FP32"),
    ControlInput("id", "CORRID", "UINT64"),
)
SUM = SequenceState("before", "after", "FP32", [1])
HOUR = 3600.0
DIRECT = SequenceBatching(max_idle=100, controls=CONTROLS, states=[SUM])
LONG = SequenceBatching(max_idle=HOUR, controls=CONTROLS, states=[SUM])


class Summing(Model):
    """Answers the sum of what its sequence has sent; `before` and `after` are its state."""

    inputs = [TensorSpec("x", "FP32", [-1, 1])]
    outputs = [TensorSpec("y", "FP32", [-1, 1])]
    max_batch_size = 4
    sequence_batching = SequenceBatching(controls=CONTROLS, states=[SUM])

    def __init__(self, batching: SequenceBatching | None = None, *, rows: int = 4, instances: int = 1) -> None:
        if batching is not None:
            self.sequence_batching = batching
        self.max_batch_size = rows
        self.instances = instances
        if not rows:
            self.inputs, self.outputs = [TensorSpec("x", "FP32", [1])], [TensorSpec("y", "FP32", [1])]
        self.seen: list[dict[str, Any]] = []

    def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
        self.seen.append({name: array.copy() for name, array in inputs.items()})
        y = inputs["x"] + inputs["before"]
        return {"y": y, "after": y}


def sequence_call(sequence_id: int | str, *, start: bool = False, end: bool = False, timeout: float = 0.0) -> Call:
    """A call for one request of a sequence."""
    call = Call()
    call.model_name = "summing"
    call.scheduling = Scheduling(sequence_id=sequence_id, sequence_start=start, sequence_end=end, timeout=timeout)
    return call


async def send(servable: Servable, value: float, sequence_id: int | str, **flags: Any) -> float:
    """The sum that a `Summing` answers."""
    shape = (1, 1) if servable.model.max_batch_size else (1,)
    answer = await direct_infer(
        servable, {"x": np.full(shape, value, np.float32)}, sequence_call(sequence_id, **flags)
    )
    return float(answer["y"].item())


async def refusal(servable: Servable, sequence_id: int | str, **flags: Any) -> ServingError:
    """What a request is refused with."""
    with pytest.raises(ServingError) as caught:
        await send(servable, 1, sequence_id, **flags)
    return caught.value


def reading(servable: Servable, name: str, **labels: str) -> float:
    (value,) = [
        found.value for found in servable.readings() if found.name == name and dict(found.labels) == labels
    ]
    return value


class Lease:
    """Counts how often it is held."""

    def __init__(self) -> None:
        self.held = 0

    def __enter__(self) -> None:
        self.held += 1

    def __exit__(self, *_: object) -> None:
        self.held -= 1


class _Timer:
    def __init__(self, at: float, run: Callable[[], None]) -> None:
        self.at = at
        self.run = run

    def cancel(self) -> None:
        self.at = math.inf


class Driver:
    """The loop and the instances of one schedule: nothing happens but what the test does next."""

    def __init__(self, model: Model, *, limit: int = 1000) -> None:
        self.now = 0.0
        self.executors = [HeldExecutor() for _ in range(model.instances)]
        self.lease = Lease()
        self._model = model
        self._timers: list[_Timer] = []
        self._deferred: list[Callable[[], None]] = []
        self.schedule = SequenceSchedule(
            model, limit, self.executors, self._deferred.append, self._later, lambda: self.now
        )
        self.schedule.lease = self.lease
        self.timers_fired = 0

    def _later(self, seconds: float, run: Callable[[], None]) -> _Timer:
        self._timers.append(_Timer(self.now + seconds, run))
        return self._timers[-1]

    def send(self, value: float, sequence_id: int | str, **flags: Any) -> FutureWork:
        """Put a request. Raise as `Schedule.put`."""
        return self.put(value, sequence_call(sequence_id, **flags))

    def put(self, value: float, call: Call) -> FutureWork:
        """Put a request of this call."""
        shape = (1, 1) if self._model.max_batch_size else (1,)
        return self.put_inputs({"x": np.full(shape, value, np.float32)}, call)

    def put_inputs(self, inputs: Inputs, call: Call) -> FutureWork:
        """Put a request of these inputs."""
        execution = FutureWork(inputs, call)
        self.schedule.put(execution)
        return execution

    def take(self, instance: int = 0) -> SequenceBatch | None:
        """What the instance runs next, if there is something now and it runs nothing else."""
        self.turn()
        started = self.executors[instance].started
        work = started.pop(0) if started else None
        assert work is None or isinstance(work, SequenceBatch)
        return work

    def finish(self, batch: SequenceBatch, infer: Callable[..., Any] | None = None) -> None:
        """Run what was taken, by the model's `infer` or another, and deliver it."""
        batch.run(infer or self._model.infer, _explain)
        batch.deliver()
        self.turn()

    def run(self, instance: int = 0) -> bool:
        """Let the instance run what it would run now, if there is something."""
        batch = self.take(instance)
        if batch is not None:
            self.finish(batch)
        return batch is not None

    def turn(self) -> None:
        """What the loop does in its next turn."""
        while self._deferred:
            self._deferred.pop(0)()

    def wait(self, seconds: float) -> None:
        """Let time pass; timers come when they are due."""
        end = self.now + seconds
        while (
            timer := min(self._timers, key=lambda timer: timer.at, default=None)
        ) is not None and timer.at <= end:
            self._timers.remove(timer)
            self.now = max(self.now, timer.at)
            self.timers_fired += 1
            timer.run()
            self.turn()
        self._timers = [timer for timer in self._timers if timer.at < math.inf]
        self.now = end

    @property
    def timers(self) -> int:
        """Timers that would still come."""
        return sum(timer.at < math.inf for timer in self._timers)

    def reading(self, name: str, **labels: str) -> float:
        """One of the schedule's readings."""
        (value,) = [
            reading.value
            for reading in self.schedule.readings()
            if reading.name == name and dict(reading.labels) == labels
        ]
        return value


def rows_of(batch: SequenceBatch | None) -> list[int]:
    """The sequence in each row; 0 for none."""
    assert batch is not None
    return [0 if row is None else int(row.scheduling.sequence_id) for row in batch._rows]


def started(batching: SequenceBatching, count: int, **options: Any) -> Driver:
    """A driver of so many sequences, from 1 on, that have had their first request."""
    driver = Driver(Summing(batching, **options))
    for number in range(1, count + 1):
        driver.send(0, number, start=True)
    while any([driver.run(instance) for instance in range(len(driver.executors))]):  # noqa: C419 - each of them has its turn
        pass
    return driver


def value_of(execution: FutureWork) -> float:
    """What was answered. Raise what it failed with."""
    return float(execution.future.result()["y"].item())


def error_of(execution: FutureWork) -> ServingError:
    """What it failed with."""
    error = execution.future.exception()
    assert isinstance(error, ServingError)
    return error


def _explain(error: BaseException) -> ServingError:
    return as_serving_error(error, "the model")
