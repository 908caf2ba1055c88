"""Two outputs with different first dims."""

import numpy as np

from triglot import Model, TensorSpec


class RaggedOut(Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("a", "FP32", [2]), TensorSpec("b", "FP32", [1])]

    def infer(self, inputs):
        total = inputs["x"].sum()
        return {"a": np.full(2, total), "b": np.full(1, total)}
