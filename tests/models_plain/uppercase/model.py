"""Text in capitals. BYTES elements are `bytes`, in and out."""

import numpy as np

import triglot


class Uppercase(triglot.Model):
    inputs = [triglot.TensorSpec("text", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("upper", "BYTES", [-1])]

    def infer(self, inputs):
        texts = [self.upper(text) for text in inputs["text"].flat]
        return {"upper": np.array(texts, dtype=object).reshape(inputs["text"].shape)}

    def upper(self, text):
        try:
            return text.decode().upper().encode()
        except UnicodeDecodeError as error:
            raise triglot.InvalidArgument(f"text must be UTF-8: {error}") from None
