"""An overloaded server: excess calls are refused at once, and told when to retry."""

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
    STREAMS,
    UNARY,
    Interface,
    infer_message,
    kserve_grpc,
    kserve_stream,
    looks,
)
from tests.scheduling.scripted_models import Inputs, Plain, Scripted
from tests.transports.live import Live, live
from tests.waiting import until
from triglot.core.errors import Code, Unavailable

pytestmark = pytest.mark.both_transports

EVERY_INTERFACE = pytest.mark.parametrize("interface", INTERFACES.values(), ids=INTERFACES)
HINTED = [*UNARY.values(), STREAMS["grps gRPC stream"]]


def metric(server: Live, name: str, **labels: str) -> float:
    """A reading of the only model's."""
    (version,) = server.server.manager.registry.versions()
    assert version.servable is not None
    values = [
        reading.value
        for reading in version.servable.readings()
        if (reading.name, dict(reading.labels)) == (name, labels)
    ]
    (value,) = values
    return value


@asynccontextmanager
async def busy(**options: Any) -> AsyncIterator[Live]:
    """A server that holds two requests; one runs, and the other waits."""
    model = Scripted(open_gate=False)
    async with live({MODEL: model}, **options) as server:
        tasks = [asyncio.ensure_future(kserve_grpc(server, 1))]
        await model.until_at("infer")
        tasks.append(asyncio.ensure_future(kserve_grpc(server, 2)))
        await until(lambda: server.server.dataplane.queue_depth() == 1)
        try:
            yield server
        finally:
            model.open_point("infer")
            assert [outcome.value for outcome in await asyncio.gather(*tasks)] == [2, 4]


def hint(interface: Interface) -> float | None:
    """The hint that a refusal over this interface has."""
    return 1.0 if interface in HINTED else None


@EVERY_INTERFACE
async def test_a_full_queue_refuses_at_once(interface: Interface) -> None:
    async with busy(max_queue_size=1) as server:
        async with asyncio.timeout(SECONDS):
            outcome = await interface(server, 1)
        assert (outcome.code, outcome.retry) == (Code.RESOURCE_EXHAUSTED, hint(interface))
        assert (
            "Exceeds maximum queue size: 1 requests are queued, the most that max_queue_size allows"
            in outcome.text
        )
        assert metric(server, "requests_refused", limit="max_queue_size") == 1
        await looks(server)


@EVERY_INTERFACE
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("max_queue_bytes", "the model holds "),
        ("max_total_queue_bytes", "all models hold "),
        ("max_total_queue_size", "all models hold 2 requests, the most that max_total_queue_size allows"),
    ],
)
async def test_too_many_requests_or_bytes_are_refused_at_once(
    interface: Interface, option: str, text: str
) -> None:
    size = 2 * len(infer_message(0).SerializeToString())
    async with busy(**{option: 2 if option.endswith("size") else size}) as server:
        async with asyncio.timeout(SECONDS):
            outcome = await interface(server, 1)
        assert (outcome.code, outcome.retry) == (Code.RESOURCE_EXHAUSTED, hint(interface))
        assert f"Exceeds maximum queue size: {text}" in outcome.text
        assert f"{option} allows" in outcome.text
        assert metric(server, "requests_refused", limit=option) == 1
        assert metric(server, "held_requests") == 2
        await looks(server)


@EVERY_INTERFACE
async def test_one_request_is_never_too_much(interface: Interface) -> None:
    options: dict[str, Any] = {"max_queue_bytes": 1, "max_total_queue_bytes": 1, "max_total_queue_size": 1}
    async with live({MODEL: Scripted()}, **options) as server:
        for value in range(3):
            assert (await interface(server, value)).value == 2 * value
        assert metric(server, "held_requests") == metric(server, "held_bytes") == 0


@EVERY_INTERFACE
async def test_missing_model_is_not_reported_as_full(interface: Interface) -> None:
    def infer(inputs: Inputs) -> Any:
        raise Unavailable("not now", retry_after=2.0)

    async with live({MODEL: Plain(infer)}) as server:
        outcome = await interface(server, 1)
        assert "not now" in outcome.text
        if interface is not kserve_stream:  # Its errors have no code.
            assert outcome.code is Code.UNAVAILABLE
        assert outcome.retry == (2.0 if interface in HINTED else None)
