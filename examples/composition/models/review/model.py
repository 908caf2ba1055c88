"""Says whether a review is positive, by two other models."""

import numpy as np

import triglot


class Review(triglot.Model):
    inputs = [triglot.TensorSpec("text", "BYTES", [1])]
    outputs = [triglot.TensorSpec("verdict", "BYTES", [1])]

    async def infer(self, inputs, call):
        words = await call.infer("words", {"text": inputs["text"]})
        score = (await call.infer("sentiment", {"words": words["words"]}))["score"][0]
        verdict = "positive" if score > 0 else "negative" if score < 0 else "undecided"
        return {"verdict": np.array([verdict], object)}
