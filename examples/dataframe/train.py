"""Fits which customers leave, from the plan, the months of the contract, and calls to the support."""

import joblib
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

random = np.random.default_rng(0)
customers = pd.DataFrame(
    {
        "plan": random.choice(["basic", "premium"], 500),
        "months": random.integers(1, 48, 500),
        "calls": random.integers(0, 10, 500),
    }
)
risk = customers["calls"] * 4 - customers["months"] + 10 * (customers["plan"] == "basic")
leaves = np.where(risk + random.normal(0, 5, 500) > 0, "leaves", "stays")

columns = make_column_transformer((OneHotEncoder(), ["plan"]), (StandardScaler(), ["months", "calls"]))
pipeline = make_pipeline(columns, LogisticRegression())
joblib.dump(pipeline.fit(customers, leaves), "churn.joblib")
