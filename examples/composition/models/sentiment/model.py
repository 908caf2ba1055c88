"""Adds up what words are worth."""

import numpy as np

import triglot

WORTH = {b"good": 1, b"great": 2, b"bad": -1, b"awful": -2}


class Sentiment(triglot.Model):
    inputs = [triglot.TensorSpec("words", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("score", "FP32", [1])]

    def infer(self, inputs):
        return {"score": np.array([sum(WORTH.get(word, 0) for word in inputs["words"])], np.float32)}
