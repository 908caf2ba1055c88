"""Options of a model's configuration for instances that are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLACEMENTS = ("pack", "spread")
"""How Ray chooses nodes: "pack" is Ray's default strategy, which fills nodes; "spread" distributes instances."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Options for the instances of one model.

    `num_cpus`, `num_gpus` and other `resources`: what Ray reserves for each instance on its node; `num_gpus` None:
    1 if its instance group is one of GPUs, else 0. `placement`: one of `PLACEMENTS`. `runtime_env`: passed to Ray
    as it is.

    `send_files`: the model's files are sent to each node once; else they must exist there under the same path.
    `max_inflight`: calls or batches that an actor has at the same time: one runs while the others are transferred.
    Decoupled models and sequences have one. `max_instances`: instances are added up to this number while requests
    wait for longer than `most_wait` seconds; 0: the number is that of the instance group.
    """

    num_cpus: float = 1.0
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: str = "pack"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    send_files: bool = True
    max_inflight: int = 2
    max_instances: int = 0
    most_wait: float = 0.05

    def of_actor(self, gpus: float) -> dict[str, Any]:
        """Returns Ray's options for an actor; `gpus` is the default of `num_gpus`."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": gpus if self.num_gpus is None else self.num_gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": "SPREAD" if self.placement == "spread" else "DEFAULT",
            "runtime_env": dict(self.runtime_env),
        }
        return {name: value for name, value in options.items() if value != {}}
