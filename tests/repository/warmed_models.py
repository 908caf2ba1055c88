"""Models that are warmed once, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.scheduling.scripted_models import Inputs, Scripted, idle, number, servable
from tests.waiting import until
from triglot import Call, Model, ModelLoadError, TensorSpec
from triglot.model.config import WarmUpInput, WarmUpRequest
from triglot.repository.manager.warm_up import warm_up
from triglot.scheduling.servable import Servable

SECONDS = 30
"""How long anything may take; only a test that fails waits so long."""
NAME = "scripted version 1"


class AnyTensors(Model):
    """Keeps what it is given."""

    any_tensors = True

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        self.seen.append(dict(inputs))
        return {}


class Declared(AnyTensors):
    """The same, with one input."""

    any_tensors = False
    outputs = [TensorSpec("y", "FP32", [])]

    def __init__(self, datatype: str, shape: Sequence[int] | None = None, *, batch: int = 0) -> None:
        super().__init__()
        self.inputs = [TensorSpec("x", datatype, shape)]
        self.max_batch_size = batch
        if batch:
            self.outputs = [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        super().infer(inputs)
        return {"y": np.zeros(self.max_batch_size, np.float32) if self.max_batch_size else np.float32(0)}


def raises(error: BaseException) -> Callable[[Inputs], Any]:
    """An `infer` that fails."""

    def infer(inputs: Inputs) -> Any:
        raise error

    return infer


def raises_on_loop(error: BaseException) -> Callable[[Inputs], Any]:
    """An `infer` that fails on the loop."""

    async def infer(inputs: Inputs) -> Any:
        raise error

    return infer


async def warmed(model: Model, *requests: WarmUpRequest, example: Any = ()) -> None:
    """Warms the model, once, in a servable of its own."""
    model.example = example
    served = servable(model)
    try:
        await asyncio.wait_for(warm_up(served, requests), SECONDS)
    finally:
        assert served.leases == 0
        await served.close()


def zeros(name: str = "one", *dims: int, count: int = 1) -> WarmUpRequest:
    return WarmUpRequest(name, {"x": WarmUpInput("FP32", dims or (1,))}, count=count)


def asked(batch_size: int = 0, **inputs: WarmUpInput) -> WarmUpRequest:
    return WarmUpRequest("one", inputs, batch_size)


async def refusal(model: Model, *requests: WarmUpRequest, example: Any = ()) -> str:
    """Why the model is not served, without its name."""
    with pytest.raises(ModelLoadError) as caught:
        await warmed(model, *requests, example=example)
    name, _, text = str(caught.value).partition(": ")
    assert name == NAME
    return text


async def runs_on_every_instance(model: Scripted, servable: Servable) -> None:
    """No instance hangs somewhere: each takes a call."""
    await until(lambda: idle(servable) == model.instances)  # Out of the gate, too.
    model.close_point("infer")
    model.threads.clear()
    calls = [asyncio.ensure_future(direct_infer(servable, number(0), Call())) for _ in range(model.instances)]
    await until(lambda: len(model.threads) == model.instances)
    model.open_point("infer")
    await asyncio.gather(*calls)
