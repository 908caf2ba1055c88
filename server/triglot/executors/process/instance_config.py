"""The configuration that one process of a model loads by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from triglot.model.config import Device, ModelConfig


@dataclass(frozen=True, slots=True)
class InstanceConfig(ModelConfig):
    """A configuration of which the process of this `instance` carries out its own part.

    Of the configured devices it has one, so that a backend that places its instances loads one copy of the model.
    """

    instance: int = 0
    _counts: list[int] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, config: ModelConfig, instance: int) -> InstanceConfig:
        """The configuration, as this instance sees it; it is to load the model right here."""
        named = {one.name: getattr(config, one.name) for one in fields(ModelConfig)}
        return cls(**{**named, "execution": "thread"}, instance=instance)

    @property
    def count(self) -> int:
        """How many instances the devices of the configuration make, as far as the backend has asked; one where it
        names none."""
        return (self._counts[-1] if self._counts else 0) or 1

    def devices(self, gpu_count: Callable[[], int]) -> list[Device]:
        """Where this instance is to run. Raises as `ModelConfig.devices`."""
        devices = ModelConfig.devices(self, gpu_count)
        self._counts.append(len(devices))
        return devices[self.instance % len(devices) :][:1] if devices else []
