"""Starts the instances of a version before its first call, and changes those of a serving one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial

from triglot.core.call import Call, Reach
from triglot.core.errors import Code, Internal, ModelLoadError, ServingError, is_serving_error, text_of
from triglot.executors.hosted import HostedModel
from triglot.executors.work import Function, Inputs
from triglot.model.config import ModelConfig
from triglot.model.configure import change_instances
from triglot.model.model import Model
from triglot.repository.manager.thread import in_thread
from triglot.scheduling.servable import Servable


async def start_instances(servable: Servable, reach: Reach) -> None:
    """Call the model's `start_instance` on every instance; `reach` lets it call other models.

    Raise `ServingError` or `ModelLoadError` for its exceptions; calls that still run then are not awaited.
    """
    model = servable.model
    if type(model).start_instance is Model.start_instance:
        return
    start = partial(_start, servable, reach)
    with servable:
        if servable.on_loop:
            await _on_thread(partial(start, servable.function, {}, Call()))
        else:
            await servable.on_every_instance({}, start, to_serving_error)
    if not isinstance(model, HostedModel):  # A process starts its instances itself, in replacements, too.
        servable.preparations.append(lambda function: start(function, {}, Call()))


def _start(servable: Servable, reach: Reach, _: Function, __: Inputs, call: Call) -> None:
    call.reach = reach
    call.model_name, call.model_version = servable.name, servable.version
    servable.model.start_instance(call)


async def _on_thread(start: partial[None]) -> None:
    """Run `start` on a daemon thread, which does not keep a stopped server alive."""
    started = Future[None]()

    def run() -> None:
        try:
            start()
        except BaseException as error:  # Includes SystemExit.
            # An asyncio future rejects StopIteration.
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            started.set_exception(error if plain else to_serving_error(error))
        else:
            started.set_result(None)

    threading.Thread(target=run, name=f"start of {start.args[0]}", daemon=True).start()
    await asyncio.shield(asyncio.wrap_future(started))


def to_serving_error(error: BaseException) -> ServingError:
    """Wrap an exception with the model's own text, as the error is for the server's operator."""
    if is_serving_error(error):
        return error
    failure = (
        ServingError(text_of(error), code=error.code)
        if isinstance(error, ModelLoadError)
        else Internal(f"{type(error).__name__}: {text_of(error)}")
    )
    failure.__cause__ = error
    return failure


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
