"""y = x / 2 + 3 of a number, and a signature that regresses the feature x of Examples."""

import numpy as np

from triglot import Model, Signature, TensorSpec, parse_examples

REGRESS = "tensorflow/serving/regress"
HALF, THREE = np.float32(0.5), np.float32(3)


class HalfPlusThree(Model):
    inputs = [TensorSpec("x", "FP32", [])]
    outputs = [TensorSpec("y", "FP32", [])]
    signatures = {
        REGRESS: Signature(
            [TensorSpec("inputs", "BYTES", [])], [TensorSpec("outputs", "FP32", [])], method="regress"
        )
    }

    def infer(self, inputs, call):
        if call.signature_name == REGRESS:
            x = parse_examples(inputs["inputs"], [TensorSpec("x", "FP32", [1])])["x"]
            return {"outputs": x * HALF + THREE}
        return {"y": inputs["x"] * HALF + THREE}
