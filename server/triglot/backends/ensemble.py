"""Models that a configuration makes of others (spec 5.3)."""

from __future__ import annotations

from pathlib import Path

from triglot.core.ensemble import Ensemble
from triglot.core.model_config import ModelConfig


def load(_: Path, config: ModelConfig) -> Ensemble:
    """The ensemble that is configured; the rest of its configuration gives it its inputs and outputs."""
    model = Ensemble()
    model.model_config = config
    model.steps = config.ensemble
    model.max_inflight_requests = config.max_inflight_requests
    return model
