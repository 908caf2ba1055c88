"""Returns its input after 200 µs of work in pure Python."""

import time
from typing import Any

import triglot

SECONDS = 200e-6


class Model(triglot.Model):
    """Returns the FP32 matrix `x` as `y`. It works for 200 µs of CPU time, even if others share the core."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1, -1]),)

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        end = time.thread_time() + SECONDS
        while time.thread_time() < end:
            pass
        return {"y": inputs["x"]}
