"""The words of a text, one answer each: a decoupled model, for streaming calls."""

import numpy as np

import triglot


class TokenStream(triglot.Model):
    inputs = [triglot.TensorSpec("text", "BYTES", [1])]
    outputs = [triglot.TensorSpec("token", "BYTES", [1])]

    def infer(self, inputs, call):
        for token in inputs["text"][0].split():
            if call.cancelled:
                return
            yield {"token": np.array([token], dtype=object)}
