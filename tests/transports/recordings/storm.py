"""A storm by gRPC C-core's client: `storm.py HOST:PORT deadlines|cancels|reconnects COUNT`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio

DEADLINE_SECONDS = 1.0
RECONNECTS = 2


async def echo(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/t.T/Echo")
    assert await call(b"healthy", timeout=60) == b"healthy"


async def storm(channel: grpc.aio.Channel, how: str, count: int) -> None:
    """Calls that end together, and a healthy one before and after them."""
    await echo(channel)
    held: Any = channel.unary_unary("/t.T/Held")
    calls = [
        held(b"an ordinary request", timeout=DEADLINE_SECONDS if how == "deadlines" else None)
        for _ in range(count)
    ]
    if how != "deadlines":
        await asyncio.sleep(0.5)
        if how == "reconnects":
            return
        for call in calls:
            call.cancel()
    await asyncio.gather(*(call.code() for call in calls))
    await echo(channel)


async def main() -> None:
    target, how, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for _ in range(RECONNECTS if how == "reconnects" else 1):
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            await storm(channel, how, count)


asyncio.run(main())
