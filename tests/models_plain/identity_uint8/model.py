"""Gives back what it gets."""

import triglot


class Identity(triglot.Model):
    inputs = [triglot.TensorSpec("x", "UINT8", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "UINT8", [-1, -1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
