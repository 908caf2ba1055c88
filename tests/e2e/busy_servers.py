"""Servers whose only instance is busy, and what tests of deadlines and of callers that leave ask them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.process import SECONDS
from tests.protocol_clients.every_protocol import (
    INTERFACES,
    MODEL,
    Interface,
    Outcome,
    kserve_grpc,
    kserve_rest,
    kserve_stream,
)
from tests.scheduling.scripted_models import Scripted
from tests.transports.live import Live, live
from tests.waiting import until
from triglot.core.errors import Code

SOON = 0.05
EVERY_INTERFACE = pytest.mark.parametrize("interface", INTERFACES.values(), ids=INTERFACES)
REST = {
    name: interface
    for name, interface in INTERFACES.items()
    if "gRPC" not in name and interface is not kserve_stream
}
PARAMETERS = pytest.mark.parametrize("interface", [kserve_grpc, kserve_rest, kserve_stream])
HELD = ("held_requests", "held_bytes")


async def until_released(server: Live) -> None:
    """No call holds the model, and nothing is counted as held."""
    await until(lambda: server.leases() == 0)
    (version,) = server.server.manager.registry.versions()
    assert version.servable is not None
    assert version.servable.queue_depth == 0
    assert [reading.value for reading in version.servable.readings() if reading.name in HELD] == [0, 0]


async def ask(server: Live, interface: Interface, value: float = 1, **more: Any) -> Outcome:
    async with asyncio.timeout(SECONDS):
        return await interface(server, value, **more)


@asynccontextmanager
async def busy(model: Scripted, **options: Any) -> AsyncIterator[Live]:
    """A server whose only instance runs a request with the value 0, which ends well when the block has ended."""
    async with live({MODEL: model}, **options) as server:
        first = asyncio.ensure_future(kserve_grpc(server, 0, timeout=SECONDS))
        await model.until_at("infer")
        try:
            yield server
        finally:
            model.open_point("infer")
            assert (await first).code is Code.OK
        await until_released(server)
