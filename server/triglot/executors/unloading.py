"""The end of a loaded model, however long its code takes to notice."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from triglot.executors.hosted import HostedModel
from triglot.model.model import Model

log = logging.getLogger(__name__)

UNLOAD_PATIENCE_SECONDS = 2.0


async def unload(model: Model, name: str, at_rest: Callable[[], object]) -> None:
    """Close the model once `at_rest`, which blocks while it runs, has returned.

    It is given `UNLOAD_PATIENCE_SECONDS`, and then left alone: it is closed when its last call has ended.
    """
    unloaded: Future[None] = Future()
    held = [(model, at_rest)]

    def close() -> None:
        held[0][1]()
        try:
            held[0][0].close()
        except BaseException:  # A model that calls exit() would seem to run still.
            log.exception("%s failed to close", name)
        held.clear()  # This thread may live on for a moment when all are told.
        # Of a future that nobody waits for any more there is nothing to tell.
        if unloaded.set_running_or_notify_cancel():
            unloaded.set_result(None)

    # A daemon, like the instances: a model that never returns must not keep a stopped server alive.
    threading.Thread(target=close, daemon=True).start()
    waiting = asyncio.wrap_future(unloaded)
    await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
    if not waiting.done() and isinstance(model, HostedModel):
        model.abandon()
        await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
    if not waiting.done():
        waiting.cancel()
        log.warning("%s still runs; the server does not wait for it", name)
