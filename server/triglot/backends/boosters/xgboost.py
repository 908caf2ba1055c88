"""XGBoost's boosters, of files of its own (`xgboost`) and pickled (`sklearn`), as models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xgboost

from triglot.backends import error_text
from triglot.backends.columns import INPUT, Columns
from triglot.backends.pickles import content_of
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.model import Model

VECTOR_INTERCEPT = (3, 1)
"""The release since which `base_score` is the text of a vector; earlier ones read that as 0.5 silently."""
_JSON_VERSION = re.compile(rb'"version"\s*:\s*\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]')
_UBJSON_VERSION = re.compile(rb"version\[#L\0{7}\x03((?:i.){3})", re.DOTALL)


def check_pickle(file: Path) -> None:
    """Raise `ModelLoadError` as `check_release`, for a booster in a pickle."""
    if _release(xgboost.__version__) < VECTOR_INTERCEPT:
        check_release(file, content_of(file))


def check_release(file: Path, content: bytes, installed: str = xgboost.__version__) -> None:
    """Raise `ModelLoadError` for the `content` of a file that the installed release would read wrongly."""
    written = written_by(content)
    if written >= VECTOR_INTERCEPT > _release(installed):
        release = ".".join(map(str, written))
        raise ModelLoadError(
            f"{file}: it was written by xgboost {release}, and xgboost {installed} would return wrong values for "
            f"it; run: pip install 'xgboost>={release}'"
        )


def written_by(content: bytes) -> tuple[int, ...]:
    """Return the release of XGBoost that wrote a model in JSON or UBJSON, or a pickle of one; () if unknown."""
    found = [tuple(map(int, match.groups())) for match in _JSON_VERSION.finditer(content)]
    found += [tuple(match[1][1::2]) for match in _UBJSON_VERSION.finditer(content)]
    return max(found, default=())


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


class BoosterModel(Model):
    """A booster: input `x` FP32 [-1, n], or its features by their names; output `predict` FP32.

    The output's shape and meaning depend on the objective.

    NaN is a missing value, 0 is a zero (tfs 7.2). All trees are used, whereas classes of `xgboost.sklearn` that
    were stopped early use their best ones.
    """

    platform = "xgboost"
    any_inputs = True

    def __init__(self, booster: xgboost.Booster) -> None:
        self._booster = booster
        names = booster.feature_names or [f"{INPUT}{at}" for at in range(booster.num_features())]
        self._columns = Columns(names, "FP32", named=bool(booster.feature_names))
        self.inputs, self.columns, self.unnamed = (
            self._columns.specs,
            self._columns.columns,
            self._columns.unnamed,
        )
        row = np.full((1, booster.num_features()), np.nan, np.float32)
        self.outputs = [TensorSpec("predict", "FP32", [-1, *self._predict(row).shape[1:]])]

    def infer(self, inputs: Mapping[str, Array], _: Call | None = None) -> dict[str, Array]:
        """Predicts. Raise `InvalidArgument` for values that XGBoost rejects, with its text (tfs 7.3)."""
        try:
            matrix = self._columns.matrix(inputs)
        except InvalidArgument as error:
            raise InvalidArgument(f"Could not initialize DMatrix from inputs: {error.message}") from error
        return {"predict": self._predict(matrix)}

    def _predict(self, x: Array) -> Array:
        try:
            matrix = xgboost.DMatrix(
                x,
                feature_names=self._booster.feature_names,
                feature_types=self._booster.feature_types,
            )
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"Could not initialize DMatrix from inputs: {error_text(error)}") from error
        try:
            result: Array = self._booster.predict(matrix)
        except ValueError as error:
            raise InvalidArgument(f"Exception during xgboost prediction: {error_text(error)}") from error
        return result
