"""Rows, scaled: a model with a batch dimension."""

import triglot


class Batching(triglot.Model):
    inputs = [triglot.TensorSpec("rows", "FP32", [-1, 3]), triglot.TensorSpec("factor", "FP32", [-1])]
    outputs = [triglot.TensorSpec("scaled", "FP32", [-1, 3])]
    max_batch_size = 4

    def infer(self, inputs):
        return {"scaled": inputs["rows"] * inputs["factor"][:, None]}
