"""Models that join requests, driven from outside, and what is seen of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.direct_work import direct_infer
from triglot import Call, Model, TensorSpec
from triglot.core.request_scheduling import PLAIN, Scheduling
from triglot.model.scheduling import DynamicBatching
from triglot.scheduling.servable import Servable
from triglot.testing import GatedModel

Array = NDArray[Any]
Inputs = Mapping[str, Array]
FOREVER = 3600.0


def rows(*values: float, width: int = 1, dtype: str = "f4") -> dict[str, Array]:
    """An input with a row for each value."""
    return {"x": np.repeat(np.array(values, dtype)[:, None], width, axis=1)}


class Joining(GatedModel):
    """A model whose requests are joined; `batches` are the first values of each row of each execution."""

    inputs = [TensorSpec("x", "FP32", [-1, -1])]
    outputs = [TensorSpec("y", "FP32", [-1, -1])]

    def __init__(
        self, batching: DynamicBatching | None = None, *, max_batch_size: int = 8, instances: int = 1
    ) -> None:
        super().__init__(
            dynamic_batching=batching or DynamicBatching(), max_batch_size=max_batch_size, instances=instances
        )
        self.batches: list[list[float]] = []


class Batched(Joining):
    """Answers with `answer(inputs)`, when the test lets it; `open_gate`: at once."""

    def __init__(
        self,
        batching: DynamicBatching | None = None,
        *,
        open_gate: bool = True,
        answer: Callable[[Inputs], Any] = lambda inputs: {"y": inputs["x"] * 2},
        **limits: int,
    ) -> None:
        super().__init__(batching, **limits)
        if not open_gate:
            self.close_point("infer")
        self.calls: list[Call] = []
        self.seen: list[Array] = []
        self.answer = answer

    def infer(self, inputs: Inputs, call: Call) -> Any:
        self.batches.append(inputs["x"][:, 0].tolist())
        self.calls.append(call)
        self.seen.append(inputs["x"])
        self.wait_at("infer")
        return self.answer(inputs)


def call(scheduling: Scheduling = PLAIN, **parameters: Any) -> Call:
    """A call that says this."""
    made = Call()
    made.scheduling = scheduling
    made.parameters = parameters
    return made


class Site:
    """One servable of a model, and requests to it."""

    def __init__(self, model: Model, max_queue_size: int = 1000) -> None:
        self.servable = Servable("batched", 1, model, max_queue_size=max_queue_size)

    def ask(self, inputs: Mapping[str, Any], own: Call | None = None) -> asyncio.Task[Any]:
        """A request that continues by itself."""
        return asyncio.ensure_future(direct_infer(self.servable, inputs, own or Call()))

    async def ask_and_wait(self, *inputs: Mapping[str, Any]) -> list[asyncio.Task[Any]]:
        """Requests that wait by now: every instance is busy."""
        await asyncio.sleep(0)  # What was asked before waits by then.
        before = self.servable.queue_depth
        tasks = [self.ask(tensor) for tensor in inputs]
        await self.until(before + len(tasks))
        return tasks

    async def until(self, waiting: int) -> None:
        """Wait until so many requests wait."""
        async with asyncio.timeout(30):
            while self.servable.queue_depth != waiting:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)

    async def busy(self, model: Batched, own: Call | None = None) -> asyncio.Task[Any]:
        """Have the only instance, which is idle, run something, which the gate ends."""
        model.forget_arrivals("infer")  # Of what has been answered.
        task = self.ask(rows(0), own)
        await model.until_at("infer")
        return task

    def closed(self) -> dict[str, float]:
        """Batches, by the reason why they were closed."""
        return {
            reading.labels["reason"]: reading.value
            for reading in self.servable.readings()
            if reading.name == "batches_closed"
        }

    def reading(self, name: str) -> float:
        """The one value of a metric."""
        (value,) = [reading.value for reading in self.servable.readings() if reading.name == name]
        return value


def first_values(answer: Mapping[str, Array]) -> list[float]:
    """Of each row of the output."""
    values: list[float] = answer["y"][:, 0].tolist()
    return values
