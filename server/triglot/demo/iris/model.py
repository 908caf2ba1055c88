"""Tells the species of an iris from four lengths in centimetres.

The scores are Fisher's linear discriminants of his own 150 flowers ("The use of multiple measurements in taxonomic
problems", 1936), as codegen/demo_models.py computes them; 147 of the flowers get their species.
"""

import numpy as np

import triglot

COLUMNS = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
SPECIES = np.array([b"setosa", b"versicolor", b"virginica"], object)
WEIGHTS = np.array([[6.44, 12.39, -17.29, -21.19], [-1.56, -4.47, 4.79, 3.13], [-4.88, -7.92, 12.5, 18.07]])
BIAS = np.array([-15.77, -2.04, -34.2])


class Iris(triglot.Model):
    inputs = [triglot.TensorSpec(name, "FP32", [-1]) for name in COLUMNS]
    outputs = [triglot.TensorSpec("species", "BYTES", [-1]), triglot.TensorSpec("probabilities", "FP32", [-1, 3])]
    labels = {"probabilities": SPECIES.tolist()}
    example = {"sepal_length": [6.3], "sepal_width": [2.5], "petal_length": [4.9], "petal_width": [1.5]}

    def infer(self, inputs):
        lengths = {len(column) for column in inputs.values()}
        if len(lengths) > 1:
            raise triglot.InvalidArgument(f"expected columns of one length, got {sorted(lengths)}")
        scores = np.stack([inputs[name] for name in COLUMNS], axis=1) @ WEIGHTS.T + BIAS
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities = (powers / powers.sum(axis=1, keepdims=True)).round(4).astype(np.float32)
        return {"species": SPECIES[scores.argmax(axis=1)], "probabilities": probabilities}
