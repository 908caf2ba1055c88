"""Detects a worker that hangs: it neither replies to heartbeats nor does any work.

Strategy: the supervisor sends each serving worker a heartbeat regularly; a reply means that its event loop
runs. A worker without a reply may be computing, or waiting for a processor or a disk, and will recover. One
that does neither for long hangs: it was stopped, or native code holds the interpreter's lock while it waits.
Clients whose connections the kernel assigns to it would wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from triglot.platform.cpus import cpu_seconds, has_something_to_do

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats, and for the reply."""
LATE_REPLY_SECONDS = 0.05
"""Seconds to read a reply that arrived while the supervisor itself was blocked."""
WORKING_SHARE = 0.02
"""Share of a processor that counts as work; threads that only check the time use less."""


async def wait_until_hung(pid: int, ask: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Return once the process has neither replied nor worked for `seconds`. Raise what `ask` raises."""
    silent, used = 0.0, cpu_seconds(pid)
    asked = asyncio.ensure_future(ask())
    try:
        while silent < seconds:
            for timeout in (HEARTBEAT_SECONDS, LATE_REPLY_SECONDS):
                await asyncio.wait([asked], timeout=timeout)
            before, used = used, cpu_seconds(pid)
            if asked.done():
                asked.result()
                silent = 0.0
                await asyncio.sleep(HEARTBEAT_SECONDS)
                used, asked = cpu_seconds(pid), asyncio.ensure_future(ask())
            elif used - before > WORKING_SHARE * HEARTBEAT_SECONDS or has_something_to_do(pid):
                silent = 0.0
            else:
                silent += HEARTBEAT_SECONDS
    finally:
        asked.cancel()
