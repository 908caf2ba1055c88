"""Models that a configuration completes, or contradicts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.configure import configure
from triglot.model.model import Model, signatures_of
from triglot.model.signature import DEFAULT_SIGNATURE, Signature

BATCHED = ModelConfig(max_batch_size=8)


class Echo(Model):
    """Declares nothing."""

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"]}


class Anything(Echo):
    any_tensors = True


class Pair(Echo):
    inputs = [TensorSpec("x", "FP32", [-1, 3]), TensorSpec("names", "BYTES", [-1, -1])]
    outputs = [TensorSpec("y", "FP32", [-1, -1]), TensorSpec("z", "INT64", None)]


class Counting(Model):
    def infer(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"y": inputs["x"]}


class CountingOnLoop(Model):
    async def infer(self, inputs: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"y": inputs["x"]}


class Awaited(Model):
    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"]}


class Scikit(Pair):
    platform = "sklearn"


def model_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec] = (), **attributes: Any) -> Model:
    model = Echo()
    model.inputs, model.outputs = inputs, outputs
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def signature_of(model: Model) -> Signature:
    return signatures_of(model)[DEFAULT_SIGNATURE]


def wrong(model: Model, config: ModelConfig) -> str:
    with pytest.raises(ValueError, match=": ") as caught:
        configure(model, config)
    return str(caught.value)
