"""Whether a worker lives: it answers, or it works on something.

Strategy: the supervisor asks each worker that serves every now and then; who answers has a loop that runs. One
that does not may compute, or wait for a processor or a disk, and comes back; one that does none of this for long
stands still, as when it was stopped, or when native code holds the interpreter's lock and waits: clients that the
system sends there would wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from triglot.executors.process.health import cpu_seconds, has_something_to_do

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Between two questions, and for an answer."""
READ_SECONDS = 0.05
"""For an answer that came while the supervisor itself was held up."""
WORKING = 0.02
"""Of a processor; what threads that only look at the time use is less."""


async def stands_still(pid: int, ask: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Return when the process has neither answered nor worked for so long. Raises what `ask` raises."""
    silent, used = 0.0, cpu_seconds(pid)
    asked = asyncio.ensure_future(ask())
    try:
        while silent < seconds:
            for patience in (BEAT_SECONDS, READ_SECONDS):
                await asyncio.wait([asked], timeout=patience)
            before, used = used, cpu_seconds(pid)
            if asked.done():
                asked.result()
                silent = 0.0
                await asyncio.sleep(BEAT_SECONDS)
                used, asked = cpu_seconds(pid), asyncio.ensure_future(ask())
            elif used - before > WORKING * BEAT_SECONDS or has_something_to_do(pid):
                silent = 0.0
            else:
                silent += BEAT_SECONDS
    finally:
        asked.cancel()
