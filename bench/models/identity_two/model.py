"""Returns its inputs, on an instance's thread."""

from typing import Any

import triglot


class Model(triglot.Model):
    """Returns the FP32 matrices `x` and `x2` as `y` and `y2`."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]), triglot.TensorSpec("x2", "FP32", [-1, -1]))
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]), triglot.TensorSpec("y2", "FP32", [-1, -1]))
    inputs_in_place = True

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"], "y2": inputs["x2"]}
