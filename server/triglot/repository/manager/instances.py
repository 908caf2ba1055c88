"""Other instances of a version that serves, where nothing else of its configuration differs."""

from __future__ import annotations

import asyncio
from functools import partial

from triglot.core.errors import Code, ModelLoadError
from triglot.executors.hosted import HostedModel
from triglot.model.config import ModelConfig
from triglot.model.configure import change_instances
from triglot.repository.manager.starting import explained
from triglot.repository.manager.thread import in_thread
from triglot.scheduling.servable import Servable


async def have_instances(servable: Servable, config: ModelConfig, before: ModelConfig) -> bool:
    """Have those come that a configuration says, and those go that it does not say; the others go on meanwhile.

    An instance that has sequences goes when these are over, which is not waited for. `before`: the configuration
    that they were made by, which differs in its instances only. False where the version has to be loaded anew for
    that, since the model places its instances as it is loaded, or its sequences do, or since a change before was
    given up. Raises `ModelLoadError` for what an instance raises that comes; then there are as many as before.
    """
    bound = servable.sequences is not None
    if bound and (isinstance(servable.model, HostedModel) or not _all_alike(config, before)):
        return False
    if servable.half_changed:
        return False
    try:
        return await _change(servable, config, before)
    except asyncio.CancelledError:
        servable.half_changed = True
        raise


async def _change(servable: Servable, config: ModelConfig, before: ModelConfig) -> bool:
    model = servable.model
    try:
        change = await in_thread(partial(change_instances, model, config))
    except ValueError as wrong:
        raise ModelLoadError(f"{config.source}: {wrong}", Code.INVALID_ARGUMENT) from wrong
    if change is None:
        return False
    come, go = change
    if errors := await servable.resize(come, go):
        back = await in_thread(partial(change_instances, model, before))
        await servable.resize(0, min(come - len(errors), back[1] if back else 0))
        error = explained(errors[0])
        raise ModelLoadError(f"{servable}: {error.message}", error.code) from errors[0]
    model.model_config = config
    return True


def _all_alike(*configs: ModelConfig) -> bool:
    """Whether it does not matter which instance goes: all are on one device."""
    groups = [group for config in configs for group in config.instance_groups]
    kinds = {(group.kind, *group.gpus) for group in groups}
    return len(kinds) == 1 and not any(group.kind == "GPU" and len(group.gpus) != 1 for group in groups)
