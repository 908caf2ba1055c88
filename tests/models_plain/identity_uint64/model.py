"""Gives back what it gets."""

import triglot


class Identity(triglot.Model):
    inputs = [triglot.TensorSpec("x", "UINT64", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "UINT64", [-1, -1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
