"""A server that has more to do than it can: who comes too many is refused at once, and told when to come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from async_doors import DOORS, MODEL, STREAMS, UNARY, Door, Told, grps_rest, kserve_grpc, kserve_rest, looks
from live import Live, live
from scripted_models import Scripted

from triglot.core.errors import Code

EVERY_DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
HINTED = [*UNARY.values(), STREAMS["grps gRPC stream"]]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a request that is on its way brings about."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the server sets no event of the test's
            await asyncio.sleep(0.001)


def metric(server: Live, name: str, **labels: str) -> float:
    """A reading of the only model's."""
    (version,) = server.server.manager.versions()
    assert version.servable is not None
    values = [one.value for one in version.servable.readings() if (one.name, dict(one.labels)) == (name, labels)]
    (value,) = values
    return value


@asynccontextmanager
async def busy(requests: int = 2, **options: Any) -> AsyncIterator[tuple[Live, list[asyncio.Task[Told]]]]:
    """A server that holds so many requests of 4 bytes and some, the first of which runs."""
    model = Scripted(open_gate=False)
    async with live({MODEL: model}, **options) as server:
        tasks = []
        for held in range(requests):
            tasks.append(asyncio.ensure_future(kserve_grpc(server, held)))
            await until(lambda: server.leases() == len(tasks))  # noqa: B023
        await model.wait_until_entered()
        try:
            yield server, tasks
        finally:
            model.gate.set()
            assert [told.value for told in await asyncio.gather(*tasks)] == [2 * held for held in range(requests)]


def hint(door: Door) -> float | None:
    """The hint that a refusal by this door has."""
    return 1.0 if door in HINTED else None


@EVERY_DOOR
async def test_a_full_queue_refuses_at_once(door: Door) -> None:
    async with busy(max_queue_size=1) as (server, _):
        told = await door(server, 1)
        assert (told.code, told.retry) == (Code.RESOURCE_EXHAUSTED, hint(door))
        assert "Exceeds maximum queue size: 1 requests wait, as many as max_queue_size allows" in told.text
        assert metric(server, "requests_refused", limit="max_queue_size") == 1
        await looks(server)


@EVERY_DOOR
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("max_queue_bytes", "the model holds "),
        ("max_total_queue_bytes", "all models hold "),
        ("max_total_queue_size", "all models hold 2 requests, as many as max_total_queue_size allows"),
    ],
)
async def test_too_many_requests_or_bytes_are_refused_at_once(door: Door, option: str, text: str) -> None:
    # Two of KServe's messages have less than 100 bytes, three have more, and nobody's message is smaller.
    async with busy(**{option: 2 if option.endswith("size") else 100}) as (server, _):
        told = await door(server, 1)
        assert (told.code, told.retry) == (Code.RESOURCE_EXHAUSTED, hint(door))
        assert f"Exceeds maximum queue size: {text}" in told.text
        assert f"{option} allows" in told.text
        assert metric(server, "requests_refused", limit=option) == 1
        assert metric(server, "held_requests") == 2
        await looks(server)


@EVERY_DOOR
async def test_one_request_is_never_too_much(door: Door) -> None:
    options: dict[str, Any] = {"max_queue_bytes": 1, "max_total_queue_bytes": 1, "max_total_queue_size": 1}
    async with live({MODEL: Scripted()}, **options) as server:
        for value in range(3):
            assert (await door(server, value)).value == 2 * value
        assert metric(server, "held_requests") == metric(server, "held_bytes") == 0
