"""Loads and unloads at the same time, by clients that may leave, on a server that may stop."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.protocols.control_clients import (
    EXPLICIT,
    FAILS,
    FINE,
    SAYS,
    UNLOADED,
    Explicit,
    Loads,
    Row,
    ask,
    config_text,
    control_of,
    put,
    saying,
    until_index,
)
from tests.protocols.kserve_served import serve_models
from tests.waiting import SECONDS, until
from triglot.core.errors import Code


@pytest.fixture(params=["grpc", "rest"])
def explicit(request: pytest.FixtureRequest, tmp_path: Path) -> Explicit:
    return Explicit(request.param, tmp_path)


@pytest.fixture
def load() -> Loads:
    return Loads()


# --- at the same time ---


async def test_one_model_by_many_at_once(explicit: Explicit, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with explicit(load=load) as (_, control):
        load.gate.clear()
        loading = [asyncio.create_task(control.load("a")) for _ in range(10)]
        await until(lambda: len(load.begun) == 1)
        assert await control.index() == [Row("a", "1", "LOADING")]
        assert not await control.ready("a")
        assert not await control.ready()
        load.gate.set()
        assert await asyncio.gather(*loading) == [FINE] * 10
        assert load.begun == ["a/1"]


async def test_many_models_at_once(explicit: Explicit, tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(10)]
    for number, name in enumerate(names):
        put(tmp_path / name, says=number, text=FAILS if number == 3 else SAYS)
    async with explicit() as (served, control):
        outcomes = await asyncio.gather(*(control.load(name) for name in names))
        assert [outcome == FINE for outcome in outcomes] == [number != 3 for number in range(10)]
        assert [await ask(served, name) for name in names if name != "m3"] == [0, 1, 2, *range(4, 10)]
        await asyncio.gather(*(control.unload(name) for name in names))
        assert {row.reason for row in await control.index() if row.state == "UNAVAILABLE"} == {UNLOADED}


async def test_a_model_that_is_unloaded_while_it_loads(explicit: Explicit, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with explicit(load=load) as (_, control):
        load.gate.clear()
        loading = asyncio.create_task(control.load("a"))
        await until(lambda: load.begun == ["a/1"])
        assert await control.unload("a") == FINE
        assert await control.index() == [Row("a", "1", "LOADING")]
        load.gate.set()
        assert await loading == (
            Code.UNAVAILABLE,
            "model 'a' was unloaded or reloaded during this load",
        )
        await until_index(control, Row("a", "1", "UNAVAILABLE", UNLOADED))
        assert await control.load("a") == FINE


async def test_the_last_of_several_configurations_counts(explicit: Explicit, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with explicit(load=load) as (served, control):
        load.gate.clear()
        first = asyncio.create_task(control.load("a", config=config_text(**saying(1))))
        await until(lambda: len(load.begun) == 1)
        second = asyncio.create_task(control.load("a", config=config_text(**saying(2))))
        # It is wanted as soon as the disk has been looked at; only then does the first load go on.
        wanted = served.server.manager.registry.wanted
        await until(lambda: served.server.manager.registry.wanted is not wanted)
        load.gate.set()
        assert (await first)[0] is Code.UNAVAILABLE
        assert await second == FINE
        assert await ask(served, "a") == 2


async def test_loads_and_unloads_in_any_order(tmp_path: Path) -> None:
    """Whatever comes of each, the models are where the last word puts them."""
    names = ["a", "b", "c"]
    for name in names:
        put(tmp_path / name, says=1)
    choose = random.Random(7)
    async with serve_models([tmp_path], **EXPLICIT) as served:

        async def client(interface: str) -> None:
            control = control_of(served, interface)
            for _ in range(20):
                name = choose.choice(names)
                match choose.randrange(4):
                    case 0:
                        assert await control.unload(name) == FINE
                    case 1:
                        config = config_text(**saying(choose.randrange(3)))
                        code, text = await control.load(name, config=config)
                        assert code is Code.OK or (code is Code.UNAVAILABLE and "during this load" in text)
                    case 2:
                        code, text = await control.load(name)
                        assert code is Code.OK or (code is Code.UNAVAILABLE and "during this load" in text)
                    case _:
                        answer = await ask(served, name)
                        assert isinstance(answer, int) or answer[0] in (Code.NOT_FOUND, Code.UNAVAILABLE)

        await asyncio.gather(*(client(interface) for interface in ("grpc", "rest") * 3))
        control = control_of(served, "grpc")
        for name in names[:2]:
            assert await control.load(name) == FINE
            assert await ask(served, name) == 1
        assert await control.unload("c") == FINE
        rows = sorted(await control.index())
        assert [row[:3] for row in rows[:2]] == [(name, "1", "READY") for name in names[:2]]
        assert all(row.state in ("UNLOADING", "UNAVAILABLE", "LOADING") for row in rows[2:])
        assert await control.ready()


# --- clients that leave, a server that stops ---


async def test_a_client_that_leaves_while_its_model_loads(tmp_path: Path, load: Loads) -> None:
    for name in ("a", "b"):
        put(tmp_path / name / "1", says=1)
    async with serve_models([tmp_path], load, **EXPLICIT) as served:
        for name, interface in (("a", "grpc"), ("b", "rest")):
            control = control_of(served, interface)
            load.gate.clear()
            loading = asyncio.create_task(control.load(name))
            await until(lambda name=name: f"{name}/1" in load.begun)  # type: ignore[misc]
            loading.cancel()
            await asyncio.wait([loading])
            assert Row(name, "1", "LOADING") in await control.index()
            load.gate.set()
            # What it asked for is done all the same.
            async with asyncio.timeout(20):
                while Row(name, "1", "READY") not in await control.index():
                    pass
            assert await ask(served, name) == 1


async def test_a_server_that_stops_while_a_model_loads(explicit: Explicit, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    put(tmp_path / "b" / "1", says=1)
    load.gate.clear()
    async with explicit(load=load, grace=SECONDS) as (served, control):
        loads = [asyncio.create_task(control.load(name)) for name in ("a", "b")]
        await until(lambda: len(load.begun) == 1)
        await until(lambda: sum(endpoint.in_flight for endpoint in served.server.telemetry.endpoints()) == 2)
        stopping = asyncio.create_task(served.server.stop())
        assert await asyncio.gather(*loads) == [(Code.UNAVAILABLE, "the server is shutting down")] * 2
        await stopping
        assert len(load.begun) == 1
        load.gate.set()
