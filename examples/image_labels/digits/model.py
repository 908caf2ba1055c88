"""Says which digit an image shows."""

import io

import joblib
import numpy as np
from PIL import Image

import triglot


class Digits(triglot.Model):
    inputs = [triglot.TensorSpec("image", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("label", "BYTES", [-1]), triglot.TensorSpec("probability", "FP32", [-1])]

    def load(self, folder):
        self.classifier = joblib.load(folder / "digits.joblib")

    def infer(self, inputs):
        probabilities = self.classifier.predict_proba([pixels_of(file) for file in inputs["image"]])
        labels = self.classifier.classes_[probabilities.argmax(axis=1)]
        return {
            "label": np.array([str(label) for label in labels], object),
            "probability": probabilities.max(axis=1).astype(np.float32),
        }


def pixels_of(file):
    """64 values from 0 to 16, as in the classifier's training."""
    try:
        image = Image.open(io.BytesIO(file)).convert("L")
    except OSError as error:
        raise triglot.InvalidArgument(f"expected an image: {error}") from error
    return np.asarray(image.resize((8, 8), Image.Resampling.BOX)).ravel() / 16
