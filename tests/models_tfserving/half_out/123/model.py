"""Floats in, half floats out, which JSON cannot say."""

import numpy as np

from triglot import Model, TensorSpec


class HalfOut(Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP16", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"].astype(np.float16)}
