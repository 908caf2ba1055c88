"""Changes the instances of a serving version, if nothing else of its configuration differs."""

from __future__ import annotations

import asyncio
from functools import partial

from triglot.core.errors import Code, ModelLoadError
from triglot.executors.hosted import HostedModel
from triglot.model.config import ModelConfig
from triglot.model.configure import change_instances
from triglot.repository.manager.starting import to_serving_error
from triglot.repository.manager.thread import in_thread
from triglot.scheduling.servable import Servable


async def apply_instances(
    servable: Servable, config: ModelConfig, before: ModelConfig, kept: ModelConfig | None = None
) -> bool:
    """Start and end instances as `config` says; the other instances keep serving meanwhile.

    An instance that has sequences ends when these are over, without waiting for that. `before`: the configuration
    of the current instances, which differs in nothing else. Return False if the version has to be reloaded
    instead: its model places instances while loading, its sequences are bound to them, or an earlier change was
    cancelled. `kept`: the model's configuration afterwards; None: `config`. Raise `ModelLoadError` if an instance
    fails to start; the number of instances is then restored.
    """
    has_sequences = servable.sequences is not None
    if has_sequences and (isinstance(servable.model, HostedModel) or not _on_same_device(config, before)):
        return False
    if servable.half_changed:
        return False
    async with servable.resizing:
        try:
            changed = await _change(servable, config, before)
        except asyncio.CancelledError:
            servable.half_changed = True
            raise
        if changed:
            servable.model.model_config = kept or config
        return changed


async def _change(servable: Servable, config: ModelConfig, before: ModelConfig) -> bool:
    model = servable.model
    try:
        change = await in_thread(partial(change_instances, model, config))
    except ValueError as invalid:
        raise ModelLoadError(f"{config.source}: {invalid}", Code.INVALID_ARGUMENT) from invalid
    if change is None:
        return False
    added, removed = change
    if errors := await servable.resize(added, removed):
        restored = await in_thread(partial(change_instances, model, before))
        await servable.resize(0, min(added - len(errors), restored[1] if restored else 0))
        error = to_serving_error(errors[0])
        raise ModelLoadError(f"{servable}: {error.message}", error.code) from errors[0]
    return True


def _on_same_device(*configs: ModelConfig) -> bool:
    """Whether all instances are on the same device, so that any of them may end."""
    groups = [group for config in configs for group in config.instance_groups]
    kinds = {(group.kind, *group.gpus) for group in groups}
    return len(kinds) == 1 and not any(group.kind == "GPU" and len(group.gpus) != 1 for group in groups)
