"""y = x / 2 + 2, and signatures that classify and regress the feature x of Examples."""

import numpy as np

from triglot import Model, Signature, TensorSpec, parse_examples

COLUMN = [-1, 1]
EXAMPLES = [TensorSpec("inputs", "BYTES", None)]
FEATURES = [TensorSpec("x", "FP32", [1])]
HALF = np.float32(0.5)
OFFSETS = {"regress_x_to_y2": np.float32(3), "regress_x2_to_y3": np.float32(3)}


class HalfPlusTwo(Model):
    inputs = [TensorSpec("x", "FP32", COLUMN)]
    outputs = [TensorSpec("y", "FP32", COLUMN)]
    signatures = {
        "classify_x_to_y": Signature(EXAMPLES, [TensorSpec("scores", "FP32", COLUMN)], method="classify"),
        "regress_x_to_y": Signature(EXAMPLES, [TensorSpec("outputs", "FP32", COLUMN)], method="regress"),
        "regress_x_to_y2": Signature(EXAMPLES, [TensorSpec("outputs", "FP32", COLUMN)], method="regress"),
        # Takes numbers, not Examples.
        "regress_x2_to_y3": Signature(
            [TensorSpec("inputs", "FP32", COLUMN)], [TensorSpec("outputs", "FP32", COLUMN)], method="regress"
        ),
    }

    def infer(self, inputs, call):
        name = call.signature_name
        signature = self.signatures.get(name)
        if signature is None:
            return {"y": inputs["x"] * HALF + np.float32(2)}
        x = inputs["inputs"]
        if signature.inputs is EXAMPLES:
            x = parse_examples(x, FEATURES)["x"]
        return {signature.outputs[0].name: x * HALF + OFFSETS.get(name, np.float32(2))}
