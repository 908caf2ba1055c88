"""Returns its input, as a coroutine on the event loop."""

from typing import Any

import triglot


class Model(triglot.Model):
    """Returns the FP32 matrix `x` as `y`."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)

    async def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"]}
