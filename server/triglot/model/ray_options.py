"""What a configuration says of instances that are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLACEMENTS = ("pack", "spread")
"""How Ray chooses nodes: by its own rule, which fills them, or another one for each instance."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Of each instance: `num_cpus`, `num_gpus` and other `resources` are what Ray reserves for it on its node;
    `num_gpus` None: one where its instance group is of GPUs. `runtime_env` is Ray's own.

    `send_files`: the model's files are sent to each node once; else they lie there under the same path.
    `max_inflight`: calls of plain code that an actor has at the same time; one runs while the others travel.
    `max_instances`: up to so many come while requests wait for longer than `most_wait` seconds; 0: as many as the
    instance group says.
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
        """As Ray takes them; `gpus`: where nothing is said."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": gpus if self.num_gpus is None else self.num_gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": "SPREAD" if self.placement == "spread" else "DEFAULT",
            "runtime_env": dict(self.runtime_env),
        }
        return {name: value for name, value in options.items() if value != {}}
