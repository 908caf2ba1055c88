"""Options of a model for instances that are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triglot.core import checks

PLACEMENTS = ("pack", "spread")
"""How Ray chooses nodes: "pack" is Ray's default strategy, which fills nodes; "spread" distributes instances."""
MAX_AMOUNT = 999_999
MAX_INFLIGHT = 64
MAX_WAIT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Options of a model with `execution` "ray".

    Attributes:
        num_cpus, num_gpus, resources: What Ray reserves for each instance on its node; `resources` are others by
            name. `num_gpus` None: 1 if the instance group is one of GPUs, else 0.
        placement: "pack": Ray's own order, which fills a node up to a half; "spread": another node for each
            instance, if there is one.
        runtime_env: Ray's runtime environment, passed as it is.
        send_files: Whether the model's files are sent to each node; else they have the same path there.
        max_inflight: Calls or batches that an instance has at the same time: one runs while the others are
            transferred. Decoupled models and sequences have one.
        min_instances, max_instances: With `instances` "auto", instances are added and removed between these.
        max_wait: The mean seconds in the queue above which an instance is added.

    Raise `ValueError`, which names the field, for an invalid value.
    """

    num_cpus: float = 1.0
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: str = "pack"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    send_files: bool = True
    max_inflight: int = 2
    min_instances: int = 1
    max_instances: int = 0
    max_wait: float = 0.05

    def __post_init__(self) -> None:
        with checks.within("ray"):
            checks.number("num_cpus", self.num_cpus, 0, MAX_AMOUNT)
            if self.num_gpus is not None:
                checks.number("num_gpus", self.num_gpus, 0, MAX_AMOUNT)
            checks.kind("resources", self.resources, Mapping)
            for name, amount in self.resources.items():
                checks.name("resources", name)
                checks.number(f"resources[{name!r}]", amount, 0, MAX_AMOUNT)
            checks.choice("placement", self.placement, PLACEMENTS)
            checks.kind("runtime_env", self.runtime_env, Mapping)
            checks.flag("send_files", self.send_files)
            checks.count("max_inflight", self.max_inflight, 1, MAX_INFLIGHT)
            checks.count("min_instances", self.min_instances, 1)
            checks.count("max_instances", self.max_instances)
            if 0 < self.max_instances < self.min_instances:
                raise checks.expected(
                    "max_instances", f"at least the min_instances {self.min_instances}", self.max_instances
                )
            checks.number("max_wait", self.max_wait, 0.001, MAX_WAIT_SECONDS, "seconds")

    def of_actor(self, gpus: float) -> dict[str, Any]:
        """Return Ray's options for an actor; `gpus` is the default of `num_gpus`."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": gpus if self.num_gpus is None else self.num_gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": "SPREAD" if self.placement == "spread" else "DEFAULT",
            "runtime_env": dict(self.runtime_env),
        }
        return {name: value for name, value in options.items() if value != {}}


RAY_DEFAULTS = RayOptions()
