"""Reads `ensemble_scheduling` of Triton's model configuration (spec 1.4, 5.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from triglot.model.scheduling import Step
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.settings import NAME, NAME_RULE
from triglot.repository.config.values import not_negative

ENSEMBLE = "ensemble"
"""Platform or backend of an ensemble in its configuration."""
KEY = "ensemble_scheduling"
MAX_STEPS = 1000
LATEST_VERSION = -1
"""A step's version that means the highest one that serves; so does 0, the value of an unset field."""


def ensemble_of(message: pb.ModelConfig) -> tuple[tuple[Step, ...], int]:
    """Return the steps and the limit on concurrent calls of each; no steps for a model that is no ensemble.

    Raise `ValueError`, which names the key. Whether the steps fit together is checked when the ensemble is
    loaded.
    """
    named = ENSEMBLE in (message.platform, message.backend)
    has_steps = message.HasField(KEY)
    if not named and not has_steps:
        return (), 0
    if not has_steps:
        raise ValueError(f"{KEY}: expected the steps of the ensemble, got none")
    if not named:
        got = message.platform or message.backend
        raise ValueError(f"platform: expected {ENSEMBLE!r} with {KEY}, got {got!r}")
    if message.instance_group:
        raise ValueError("instance_group: expected none, as an ensemble runs on its steps' instances")
    scheduling = message.ensemble_scheduling
    if not 0 < len(scheduling.step) <= MAX_STEPS:
        raise ValueError(f"{KEY}.step: expected 1 to {MAX_STEPS} steps, got {len(scheduling.step)}")
    return tuple(_steps(scheduling)), scheduling.max_inflight_requests


def _steps(scheduling: pb.ModelEnsembling) -> Iterator[Step]:
    for at, step in enumerate(scheduling.step):
        key = f"{KEY}.step[{at}]"
        if not NAME.fullmatch(step.model_name):
            raise ValueError(f"{key}.model_name: {NAME_RULE}, got {step.model_name!r}")
        if step.model_namespace:
            raise ValueError(f"{key}.model_namespace: expected none, got {step.model_namespace!r}")
        version = step.model_version
        if version == LATEST_VERSION:
            version = 0
        not_negative(f"{key}.model_version", version)
        inputs = _named(f"{key}.input_map", step.input_map)
        outputs = _named(f"{key}.output_map", step.output_map)
        yield Step(step.model_name, inputs, outputs, version)


def _named(key: str, tensors: Mapping[str, str]) -> dict[str, str]:
    if not tensors:
        raise ValueError(f"{key}: expected at least one tensor, got none")
    for name, tensor in sorted(tensors.items()):
        if not name or not tensor:
            raise ValueError(f"{key}: expected names, got {name!r} with {tensor!r}")
    return dict(sorted(tensors.items()))
