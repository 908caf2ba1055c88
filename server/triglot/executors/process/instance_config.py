"""The configuration with which one process of a model loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar

from triglot.model.config import Device, ModelConfig


@dataclass(frozen=True, slots=True)
class InstanceConfig(ModelConfig):
    """A model's configuration as the process of the instance with the number `instance` sees it.

    It has one of the configured devices, so that a backend that places its instances loads one copy of the model.
    """

    owns_process: ClassVar[bool] = True
    instance: int = 0
    _counts: list[int] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, config: ModelConfig, instance: int) -> InstanceConfig:
        """Returns the configuration as this instance sees it: `execution` is "thread", in its own process."""
        named = {one.name: getattr(config, one.name) for one in fields(ModelConfig)}
        return cls(**{**named, "execution": "thread"}, instance=instance)

    @property
    def count(self) -> int:
        """Number of instances: of devices when the backend last called `devices`; 1 if there were none."""
        return (self._counts[-1] if self._counts else 0) or 1

    def devices(self, gpu_count: Callable[[], int]) -> list[Device]:
        """Returns the device of this instance; none without instance groups. Raises as `ModelConfig.devices`."""
        devices = ModelConfig.devices(self, gpu_count)
        self._counts.append(len(devices))
        return devices[self.instance % len(devices) :][:1] if devices else []
