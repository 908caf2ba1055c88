"""One number without dims. An `async def` model."""

import triglot


class Scalar(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP64", [])]
    outputs = [triglot.TensorSpec("y", "FP64", [])]

    async def infer(self, inputs):
        return {"y": inputs["x"] + 1}
