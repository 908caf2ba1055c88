"""Tells a text, a word at a time: each word is the one that follows the last one in TEXT."""

from itertools import pairwise

import numpy as np

import triglot

TEXT = "the quick brown fox jumps over the lazy dog and runs"


class Teller(triglot.Model):
    inputs = [triglot.TensorSpec("start", "BYTES", [1]), triglot.TensorSpec("words", "INT32", [1])]
    outputs = [triglot.TensorSpec("word", "BYTES", [1])]

    def load(self, folder):
        # Of a word that comes twice, the first one that follows it: later pairs are replaced by earlier ones.
        self.next = dict(reversed(list(pairwise(TEXT.split()))))

    def infer(self, inputs, call):
        word = inputs["start"][0].decode()
        for _ in range(int(inputs["words"][0])):
            word = self.next.get(word)
            if word is None or call.cancelled:
                return
            yield {"word": np.array([word], object)}
