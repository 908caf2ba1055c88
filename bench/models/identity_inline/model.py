"""Gives back what it gets, as a plain function on the event loop."""

from typing import Any

import triglot


class Model(triglot.Model):
    """One FP32 matrix in, the same out."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)
    execution = "inline"

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"]}
