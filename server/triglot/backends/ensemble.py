"""Models that a configuration makes of others (spec 5.3)."""

from __future__ import annotations

from pathlib import Path

from triglot.model.config import ModelConfig
from triglot.model.ensemble import Ensemble


def load(_: Path, config: ModelConfig) -> Ensemble:
    """The ensemble that is configured; the rest of its configuration gives it its inputs and outputs."""
    model = Ensemble()
    model.model_config = config
    model.steps = config.ensemble
    model.max_inflight_requests = config.max_inflight_requests
    return model
