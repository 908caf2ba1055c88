"""Squares rows, and takes 50 ms for it, however many there are."""

import time

import triglot


class Slow(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, 1])]
    max_batch_size = 64
    dynamic_batching = triglot.DynamicBatching()

    def infer(self, inputs):
        time.sleep(0.05)
        return {"y": inputs["x"] ** 2}
