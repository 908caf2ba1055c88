"""Models of every kind, to say something of their scheduling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from triglot.core.types import TensorSpec
from triglot.model.model import Model
from triglot.model.scheduling import ControlInput, SequenceBatching, SequenceState

ROWS = TensorSpec("x", "FP32", [-1])
START = ControlInput("start", "START", "INT32")
SUM = SequenceState("sum", "sum_out", "FP32", [1])
SEQUENCES = SequenceBatching(controls=[START], states=[SUM])


class Plain(Model):
    inputs, outputs = [ROWS], [ROWS]

    def infer(self, inputs: Any) -> Any:
        return inputs


class OfFile(Plain):
    platform = "onnxruntime_onnx"


class Streaming(Plain):
    def infer(self, inputs: Any) -> Iterator[Any]:
        yield inputs


class OnLoop(Plain):
    async def infer(self, inputs: Any) -> Any:
        return inputs


class StreamingOnLoop(Plain):
    async def infer(self, inputs: Any) -> AsyncIterator[Any]:
        yield inputs


def model_of(kind: type[Model] = Plain, **attributes: Any) -> Model:
    model = kind()
    vars(model).update(attributes)
    return model
