"""Two inputs of any shape, which come back."""

from triglot import Model, TensorSpec


class MultiIo(Model):
    inputs = [TensorSpec("int_tensor", "INT32", None), TensorSpec("str_tensor", "BYTES", None)]
    outputs = inputs

    def infer(self, inputs):
        return inputs
