"""The backend of ensembles that are configured instead of written in Python (spec 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig, TensorConfig
from triglot.model.ensemble import Ensemble
from triglot.model.reshaping import reshaped


def load(folder: Path, config: ModelConfig) -> Ensemble:
    """Return the configured ensemble; `configure` adds its inputs and outputs."""
    model = Ensemble()
    model.model_config = config
    model.steps = config.ensemble
    model.max_inflight_requests = config.max_inflight_requests
    _, _, model.reshaping = reshaped(folder, config, _any_shape(config.inputs), _any_shape(config.outputs))
    return model


def _any_shape(tensors: Sequence[TensorConfig]) -> list[TensorSpec]:
    return [TensorSpec(tensor.name, tensor.datatype, None) for tensor in tensors if tensor.datatype]
