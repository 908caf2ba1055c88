"""What the tests of estimators are fitted on, and how they are saved; scikit-learn and pandas are there."""

from __future__ import annotations

from pathlib import Path

import joblib
import numpy as np
import pandas as pd

import triglot
from triglot import backends

RANDOM = np.random.default_rng(1)
X = RANDOM.random((60, 3))
LABELS = (X[:, 0] > 0.5).astype(int) + (X[:, 1] > 0.5)
WORDS = np.array(["low", "middle", "größer"], object)[LABELS]
FRAME = pd.DataFrame(
    {
        "age": X[:, 0] * 90,
        "city": np.array(["Bonn", "Köln", "Ulm"], object)[RANDOM.integers(0, 3, 60)],
        "note": np.array(["a good one", "a bad one", "neither"], object)[RANDOM.integers(0, 3, 60)],
    }
)
CATEGORIES = np.column_stack([FRAME["city"], FRAME["note"]])


def save(folder: Path, found: object) -> Path:
    file = folder / "model.joblib"
    joblib.dump(found, file)
    return file


def load(folder: Path, found: object) -> triglot.Model:
    return backends.load("sklearn", save(folder, found))
