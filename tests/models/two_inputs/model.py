"""Two numbers, their sum and their difference."""

import triglot


class TwoInputs(triglot.Model):
    inputs = [triglot.TensorSpec("a", "INT32", [-1]), triglot.TensorSpec("b", "INT32", [-1])]
    outputs = [triglot.TensorSpec("sum", "INT32", [-1]), triglot.TensorSpec("difference", "INT32", [-1])]

    def infer(self, inputs):
        return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}
