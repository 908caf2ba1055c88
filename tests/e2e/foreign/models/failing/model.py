"""Fails, with a text that gRPC has to percent-encode, for x = 0 a long one; for x > 1, is busy for x seconds."""

import triglot


class Failing(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        if inputs["x"][0] > 1:
            raise triglot.QueueFull("busy", retry_after=int(inputs["x"][0]))
        raise triglot.InvalidArgument("größer als 100 %: 2³¹ ≠ 2^31" * (1 if inputs["x"][0] else 1000))
