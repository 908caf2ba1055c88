"""Adds and removes instances of a model by the time that its requests wait in the queue.

The load is sampled every `LOOK_SECONDS`. An instance is added while requests wait for longer than
`RayOptions.max_wait`. One is removed when for `CALM_LOOKS` samples requests have hardly waited, and the remaining
instances would have been busy for at most `_ROOM` of the time. The utilisation of machines is not considered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace

from triglot.core.errors import ModelLoadError, ServingError
from triglot.model.config import InstanceGroup, ModelConfig
from triglot.repository.manager.instances import apply_instances
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
CALM_LOOKS = 30
"""Consecutive samples without a wait after which an instance may be removed."""
_ROOM = 0.7
"""Largest average share of the remaining instances that would have been busy."""
_LITTLE = 0.5
"""Share of `max_wait` up to which an average wait is ignored."""


class Load:
    """Samples the load of a servable's instances. `max_wait` is in seconds."""

    def __init__(self, servable: Servable, max_wait: float) -> None:
        self._servable = servable
        self._max_wait = max_wait
        self._before = servable.statistics.queue
        self._calm: deque[float] = deque(maxlen=CALM_LOOKS)
        """Number of busy instances at each of the latest consecutive samples without a wait."""

    def step(self) -> int:
        """Take one sample; returns 1 to add an instance, -1 to remove one, 0 to keep them."""
        before, now = self._before, self._servable.statistics.queue
        self._before = now
        served, depth = now.count - before.count, self._servable.queue_depth
        wait = (now.seconds - before.seconds) / served if served else 0.0
        if wait > self._max_wait or (depth and not served):
            self._calm.clear()
            return 1
        if wait > _LITTLE * self._max_wait or depth:
            self._calm.clear()
            return 0
        self._calm.append(self._servable.busy)
        stay = self._servable.instances - 1
        if len(self._calm) == CALM_LOOKS and sum(self._calm) <= _ROOM * stay * CALM_LOOKS:
            self._calm.clear()
            return -1
        return 0


async def autoscale(servable: Servable, look_seconds: float = LOOK_SECONDS) -> None:
    """Add and remove instances of a servable, with a sample every `look_seconds`, until cancelled.

    The number stays between that of the instance groups, or the initial one, and `RayOptions.max_instances`.
    Return, with a warning, if the servable's instances can never be changed.
    """
    ray = servable.model.ray
    load = Load(servable, ray.max_wait)
    at_first = servable.instances
    while True:
        await asyncio.sleep(look_seconds)
        config = servable.model.model_config
        least = sum(group.count for group in config.instance_groups) or at_first
        wanted = min(max(least, servable.instances + load.step()), ray.max_instances)
        if wanted != servable.instances and not await _change(servable, wanted, config):
            log.warning("%s: ray_max_instances: ignored, as its instances cannot be changed", servable)
            return


async def _change(servable: Servable, count: int, config: ModelConfig) -> bool:
    """Change the number of instances to `count`; returns False if that is never possible.

    A failure to start instances is logged and tried again with a later sample.
    """
    log.info("%s: %d instances, as its queue needs", servable, count)
    try:
        before = of_instances(config, servable.instances)
        return await apply_instances(servable, of_instances(config, count), before, kept=config)
    except (ModelLoadError, ServingError) as error:
        log.warning("%s: %d instances could not be started: %s", servable, count, error)
        return True


def of_instances(config: ModelConfig, count: int) -> ModelConfig:
    """Return the configuration with `count` instances."""
    (group,) = config.instance_groups or (InstanceGroup(),)
    return replace(config, instance_groups=(replace(group, count=count),))
