"""Models saved by CatBoost itself: `model.cbm`, and its JSON by configuration."""

from __future__ import annotations

from pathlib import Path

import catboost

from triglot.backends import error_text, warn_of_unknown
from triglot.backends.boosters.catboost import CatboostModel, class_of, loss_of
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of `file`, in either format; the contents determine which. Raise `ModelLoadError`."""
    warn_of_unknown(file, config, "catboost")
    with file.open("rb") as opened:
        kind = "json" if opened.read(1) == b"{" else "cbm"
    try:
        base = catboost.CatBoost().load_model(str(file), format=kind)
        model = class_of(loss_of(base))().load_model(str(file), format=kind)
    except catboost.CatBoostError as error:
        raise ModelLoadError(
            f"{file}: catboost {catboost.__version__} cannot read it: {error_text(error)}"
        ) from error
    return CatboostModel(file, model)
