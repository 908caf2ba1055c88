"""Models that the test drives from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triglot import Call, Model
from triglot.executors.thread import ThreadExecutor
from triglot.scheduling.servable import Servable
from triglot.testing import GatedModel

Inputs = Mapping[str, NDArray[Any]]


def number(value: float) -> dict[str, NDArray[np.float32]]:
    """An input with one element."""
    return {"x": np.array([value], np.float32)}


class Scripted(GatedModel):
    """Keeps what it saw."""

    def __init__(self, *, instances: int = 1, open_gate: bool = True) -> None:
        super().__init__(*(() if open_gate else ("infer",)), instances=instances)
        self.started: list[float] = []
        self.threads: set[int] = set()
        self.calls: list[Call] = []

    def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
        self.started.append(float(inputs["x"][0]))
        self.threads.add(threading.get_ident())
        self.calls.append(call)
        self.wait_at("infer")
        return {"y": inputs["x"] * 2}


class Counting(Model):
    """Yield numbers without end, and says how many it has made and whether it was closed."""

    inputs = Scripted.inputs
    outputs = Scripted.outputs

    def __init__(self) -> None:
        self.made = 0
        self.closed = threading.Event()

    def infer(self, inputs: Inputs, call: Call) -> Iterator[dict[str, Any]]:
        try:
            while True:
                self.made += 1
                yield {"y": number(self.made)["x"]}
        finally:
            self.closed.set()


class Plain(Model):
    """`infer` given by the test."""

    inputs = Scripted.inputs
    outputs = Scripted.outputs

    def __init__(self, infer: Callable[..., Any]) -> None:
        self.infer = infer


def servable(model: Model, *, max_queue_size: int = 1000) -> Servable:
    """A servable of the model; the test closes it."""
    return Servable("scripted", 1, model, max_queue_size=max_queue_size)


def idle(servable: Servable) -> int:
    """Threads of its instances that wait for work."""
    return sum(executor.idle for executor in servable._executors if isinstance(executor, ThreadExecutor))
