"""Models of scikit-learn and XGBoost, each of three features; runs where these are installed.

python ml_models.py FOLDER      # writes FOLDER/NAME/1/…
"""

from __future__ import annotations

import sys
from pathlib import Path

import joblib
import numpy as np
import xgboost
from sklearn.linear_model import LogisticRegression

ROWS = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [0.0, 2.0, 2.0], [4.0, 4.0, 6.0]])
LABELS = np.array([0, 1, 0, 1])


def write_integers(folder: Path) -> None:
    """An estimator that predicts integers."""
    joblib.dump(LogisticRegression().fit(ROWS, LABELS), folder / "model.joblib")


def write_trees(folder: Path) -> None:
    """A booster."""
    booster = xgboost.train({"max_depth": 2, "nthread": 1}, xgboost.DMatrix(ROWS, LABELS), num_boost_round=2)
    booster.save_model(folder / "model.ubj")


if __name__ == "__main__":
    for name, write in (("integers", write_integers), ("trees", write_trees)):
        version = Path(sys.argv[1]) / name / "1"
        version.mkdir(parents=True)
        write(version)
