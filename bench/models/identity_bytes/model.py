"""Returns its input of texts, on an instance's thread."""

from typing import Any

import triglot


class Model(triglot.Model):
    """Returns the BYTES matrix `x` as `y`."""

    inputs = (triglot.TensorSpec("x", "BYTES", [-1, -1]),)
    outputs = (triglot.TensorSpec("y", "BYTES", [-1, -1]),)
    inputs_in_place = True

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"]}
