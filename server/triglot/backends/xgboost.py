"""Boosters saved by XGBoost itself: `model.bst`, `model.ubj` and `model.json`."""

from __future__ import annotations

from pathlib import Path

import xgboost

from triglot.backends import error_text, warn_of_unknown
from triglot.backends.boosters.xgboost import BoosterModel, check_release
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model


def load(file: Path, config: ModelConfig) -> Model:
    """Return the booster of `file`, in any format that XGBoost reads; the contents determine which.

    Raise `ModelLoadError`, also for old releases' binary format if the installed release no longer supports it.
    """
    warn_of_unknown(file, config, "xgboost")
    booster = xgboost.Booster()
    content = file.read_bytes()
    check_release(file, content)
    try:
        # XGBoost cannot infer the format of a .bst file and warns. JSON and UBJSON both begin with a brace.
        booster.load_model(bytearray(content) if content.startswith(b"{") else str(file))
    except ValueError as error:
        raise ModelLoadError(
            f"{file}: xgboost {xgboost.__version__} cannot read it: {error_text(error)}"
        ) from error
    return BoosterModel(booster)
