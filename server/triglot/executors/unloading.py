"""Closes a loaded model without waiting for code that does not end."""

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
    """Close the model once `at_rest`, which blocks while the model runs, has returned.

    Waits `UNLOAD_PATIENCE_SECONDS`, and for a `HostedModel`, whose processes are ended then, as long again. After
    that the model is closed in the background, when its last call has ended.
    """
    unloaded: Future[None] = Future()
    held = [(model, at_rest)]

    def close() -> None:
        held[0][1]()
        try:
            held[0][0].close()
        except BaseException:  # A model that calls exit() would otherwise seem to be running still.
            log.exception("%s failed to close", name)
        held.clear()  # This thread may outlive the future's result for a moment.
        # The future is cancelled if `unload` has stopped waiting.
        if unloaded.set_running_or_notify_cancel():
            unloaded.set_result(None)

    # A daemon, like the instances' threads: a model that never returns must not keep a stopped server alive.
    threading.Thread(target=close, daemon=True).start()
    waiting = asyncio.wrap_future(unloaded)
    await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
    if not waiting.done() and isinstance(model, HostedModel):
        model.abandon()
        await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
    if not waiting.done():
        waiting.cancel()
        log.warning("%s still runs; the server does not wait for it", name)
