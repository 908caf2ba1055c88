"""Tells a story word by word: each word is one that follows the last one in TEXT (a Markov chain)."""

import random
from itertools import pairwise

import numpy as np

import triglot

TEXT = """
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, and
what is the use of a book, thought Alice without pictures or conversations? So she was considering in her own
mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of
making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White
Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so
very much out of the way to hear the Rabbit say to itself, Oh dear! Oh dear! I shall be late! But when the
Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started
to her feet, for it flashed across her mind that she had never before seen a rabbit with either a
waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the field after it,
and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.
"""
"""How Lewis Carroll's "Alice's Adventures in Wonderland" begins (1865)."""


class Storyteller(triglot.Model):
    inputs = [
        triglot.TensorSpec("prompt", "BYTES", [1]),
        triglot.TensorSpec("words", "INT32", [1], optional=True),
        triglot.TensorSpec("seed", "INT32", [1], optional=True),
    ]
    outputs = [triglot.TensorSpec("word", "BYTES", [1])]
    example = {"prompt": ["Alice was"]}

    def load(self, folder):
        words = TEXT.encode().split()
        self.first = words[:1]
        self.following = {}
        for word, following in pairwise(words):
            self.following.setdefault(word, []).append(following)

    def infer(self, inputs, call):
        chance = random.Random(int(inputs.get("seed", [0])[0]))
        word = (inputs["prompt"][0].split() or [b""])[-1]
        for _ in range(int(inputs.get("words", [10])[0])):
            if call.cancelled:
                return
            candidates = self.following.get(word, self.first)
            # `random()` is the one that every Python draws alike.
            word = candidates[int(chance.random() * len(candidates))]
            yield {"word": np.array([word], object)}
