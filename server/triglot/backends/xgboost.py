"""Models saved by XGBoost itself: `model.bst`, `model.ubj` and `model.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xgboost

from triglot import parts
from triglot.backends import error_text, warn_of_unknown
from triglot.backends.boosters.xgboost import BoosterModel, check_release
from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model

ESTIMATORS = {"classifier": "XGBClassifier", "regressor": "XGBRegressor"}
"""Classes of `xgboost.sklearn` by the kind of estimator that a file was saved by."""
AS_BOOSTER = "as_booster"


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of `file`, in any format that XGBoost reads; the contents determine which.

    A file that an estimator of `xgboost.sklearn` saved answers as that estimator does: a classifier with classes,
    and with the signature `predict_proba`. The parameter `as_booster` serves its booster instead.
    Raise `ModelLoadError`, also for old releases' binary format if the installed release no longer supports it.
    """
    warn_of_unknown(file, config, "xgboost", (AS_BOOSTER,))
    content = file.read_bytes()
    check_release(file, content)
    # XGBoost cannot infer the format of a .bst file and warns. JSON and UBJSON both begin with a brace.
    readable = bytearray(content) if content.startswith(b"{") else str(file)
    booster = xgboost.Booster()
    try:
        booster.load_model(readable)
    except ValueError as error:
        raise ModelLoadError(
            f"{file}: xgboost {xgboost.__version__} cannot read it: {error_text(error)}"
        ) from error
    saved = json.loads(booster.attr("scikit_learn") or "{}")
    kind = ESTIMATORS.get(saved.get("_estimator_type", ""))
    wanted = config.parameters.get(AS_BOOSTER, "false")
    if wanted not in ("true", "false"):
        source = config.source or str(file)
        raise ModelLoadError(f"{source}: parameters: {AS_BOOSTER}: expected true or false, got {wanted!r}")
    if kind is None or wanted == "true":
        return BoosterModel(booster)
    try:
        sklearn: Any = parts.load_module("backend", "sklearn")
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: it was saved by an {kind}: {error}") from error
    estimator = getattr(xgboost, kind)()
    estimator.load_model(readable)
    found: Model = sklearn.xgboost_model(file, estimator)
    return found
