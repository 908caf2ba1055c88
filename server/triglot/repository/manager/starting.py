"""A version's instances before the first call: what a model does on each thread that is going to run it."""

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
    """Have the model's `start_instance` called; `reach` is its way to other models.

    Raises `ServingError` or `ModelLoadError` for what that raises; what still runs then is left alone.
    """
    model = servable.model
    if type(model).start_instance is Model.start_instance:
        return
    start = partial(_start, servable, reach)
    with servable:
        if servable.on_loop:
            await _on_thread(partial(start, servable.function, {}, Call()))
        else:
            await servable.on_every_instance({}, start, explained)
    if not isinstance(model, HostedModel):  # Whose processes are started as those that replace others.
        servable.preparations.append(lambda function: start(function, {}, Call()))


def _start(servable: Servable, reach: Reach, _: Function, __: Inputs, call: Call) -> None:
    call.reach = reach
    call.model_name, call.model_version = servable.name, servable.version
    servable.model.start_instance(call)


async def _on_thread(start: partial[None]) -> None:
    """On a thread that a server which stops does not wait for."""
    started = Future[None]()

    def run() -> None:
        try:
            start()
        except BaseException as error:  # SystemExit, too.
            # No future of asyncio's takes a StopIteration.
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            started.set_exception(error if plain else explained(error))
        else:
            started.set_result(None)

    threading.Thread(target=run, name=f"start of {start.args[0]}", daemon=True).start()
    await asyncio.shield(asyncio.wrap_future(started))


def explained(error: BaseException) -> ServingError:
    """For the server's operator, so with the model's own words."""
    if is_serving_error(error):
        return error
    failure = (
        ServingError(text_of(error), code=error.code)
        if isinstance(error, ModelLoadError)
        else Internal(f"{type(error).__name__}: {text_of(error)}")
    )
    failure.__cause__ = error
    return failure
