"""Reads `model_metrics` of Triton's model configuration (spec 6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from triglot.pb.kserve import model_config_pb2 as pb

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
"""The only metric with configurable buckets."""


def first_response_buckets(config: pb.ModelConfig) -> tuple[float, ...]:
    """Return the upper bounds of its buckets, in milliseconds; empty if not configured.

    Raise `ValueError` for missing or invalid values, as Triton does for missing ones.
    """
    buckets: tuple[float, ...] = ()
    for at, control in enumerate(config.model_metrics.metric_control):
        key = f"model_metrics.metric_control[{at}]"
        if not control.metric_identifier.family:
            raise ValueError(f"{key}.metric_identifier.family: expected a name, got none")
        given = tuple(control.histogram_options.buckets)
        if not given:
            raise ValueError(f"{key}.histogram_options.buckets: expected at least one, got none")
        if not all(map(math.isfinite, given)) or any(one >= other for one, other in pairwise(given)):
            raise ValueError(f"{key}.histogram_options.buckets: expected ascending numbers, got {list(given)}")
        if control.metric_identifier.family == FIRST_RESPONSE:
            buckets = given
    return buckets


def other_metrics(config: pb.ModelConfig) -> Iterator[str]:
    """Yield a note for each metric whose buckets are not configurable."""
    for at, control in enumerate(config.model_metrics.metric_control):
        if (family := control.metric_identifier.family) != FIRST_RESPONSE:
            key = f"model_metrics.metric_control[{at}].metric_identifier.family"
            yield f"{key}: expected {FIRST_RESPONSE}, got {family!r}, ignored"
