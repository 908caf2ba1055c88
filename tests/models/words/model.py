"""The words of a text, one answer each: a decoupled model."""

import numpy as np

import triglot


class Words(triglot.Model):
    inputs = [triglot.TensorSpec("text", "BYTES", [1])]
    outputs = [triglot.TensorSpec("word", "BYTES", [1])]

    def infer(self, inputs):
        for word in inputs["text"][0].split():
            yield {"word": np.array([word], dtype=object)}
