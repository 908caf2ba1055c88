"""A list of numbers in, one number without dims out."""

from triglot import Model, TensorSpec


class ScalarOut(Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [])]

    def infer(self, inputs):
        return {"y": inputs["x"].sum()}
