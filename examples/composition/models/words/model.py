"""Splits a text into words in lower case."""

import re

import numpy as np

import triglot


class Words(triglot.Model):
    inputs = [triglot.TensorSpec("text", "BYTES", [1])]
    outputs = [triglot.TensorSpec("words", "BYTES", [-1])]

    def infer(self, inputs):
        return {"words": np.array(re.findall(r"\w+", inputs["text"][0].decode().lower()), object)}
