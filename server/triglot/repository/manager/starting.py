"""Starts the instances of a version before its first call: calls `Model.start_instance` on their threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial

from triglot.core.call import Call, Reach
from triglot.core.errors import Internal, ModelLoadError, ServingError, is_serving_error, text_of
from triglot.executors.hosted import HostedModel
from triglot.executors.work import Function, Inputs
from triglot.model.model import Model
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
