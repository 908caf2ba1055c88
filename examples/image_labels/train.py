"""Fits handwritten digits, and writes one of them as an image."""

import joblib
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

digits = load_digits()
joblib.dump(LogisticRegression(max_iter=2000).fit(digits.data, digits.target), "digits/digits.joblib")

seven = digits.images[digits.target == 7][0]
Image.fromarray((seven * 15.9).astype(np.uint8)).resize((64, 64), Image.Resampling.NEAREST).save("seven.png")
