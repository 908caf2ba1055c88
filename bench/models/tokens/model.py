"""Yields the same row repeatedly, as a generator on the model's own thread."""

from collections.abc import Iterator
from typing import Any

import triglot


class Model(triglot.Model):
    """Yields the FP32 matrix `x` as `y` a thousand times."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)
    instances = 8  # As many streams at a time as the bench opens.

    def infer(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for _ in range(1000):
            yield {"y": inputs["x"]}
