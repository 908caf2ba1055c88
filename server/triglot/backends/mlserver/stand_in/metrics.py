"""MLServer's custom metrics: histograms of the model that runs, at `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from triglot.model.metrics import ModelMetrics

CURRENT: Final[ContextVar[tuple[ModelMetrics, Mapping[str, str]]]] = ContextVar("metrics")
"""Those of the model whose code runs, and their labels."""
_DESCRIPTIONS: Final[dict[str, str]] = {}
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds of the buckets, those of prometheus_client."""


def register(name: str, description: str) -> None:
    """Describe a metric, before or after its first value."""
    _DESCRIPTIONS[name] = description


def log(**metrics: float) -> None:
    """Observe a value of each metric. To be called in a model's own code; raise `LookupError` elsewhere."""
    own, labels = CURRENT.get()
    for name, value in metrics.items():
        family = own.family(name, _DESCRIPTIONS.get(name, name), "histogram")
        own.do(family, own.metric(family, labels, BUCKETS), "observe", float(value))
