"""A cube of any size, turned: its answer is not laid out row by row."""

import triglot


class AnyRank(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1, -1])]
    outputs = [triglot.TensorSpec("turned", "FP32", [-1, -1, -1])]

    def infer(self, inputs):
        return {"turned": inputs["x"].T}
