"""Fails, with a text that gRPC has to percent-encode."""

import triglot


class Failing(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        raise triglot.InvalidArgument("größer als 100 %: 2³¹ ≠ 2^31")
