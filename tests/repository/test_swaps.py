"""Versions are swapped under clients who call all the time, in every protocol: none sees an error."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import triglot
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.kserve import answer_value, infer_request
from tests.repository.scripted_loads import SECONDS, Blocking, Loads, Numbered, OnLoop, look_twice, put, states
from tests.waiting import until
from triglot.core.errors import Unavailable
from triglot.model.config import ALL
from triglot.pb.kserve import inference_pb2 as pb
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.manager import Manager

CLIENTS = 8
SWAPS = 25
OFTEN: dict[str, Any] = {"model_control_mode": "poll", "poll_interval": 0.01}
Ask = Callable[[], Coroutine[Any, Any, int]]


@asynccontextmanager
async def serving(*models: ModelSettings, load: Loads, **options: Any) -> AsyncIterator[triglot.Server]:
    config = triglot.Config(**{"grpc_port": 0, "rest_port": 0, "grace": 1.0} | options)
    try:
        async with triglot.Server(models=models, config=config, load=load) as server:
            yield server
    finally:
        load.open_all()


def ask_grpc(channel: grpc.aio.Channel) -> Ask:
    call = channel.unary_unary(SERVICE + "ModelInfer")

    async def ask() -> int:
        reply = await call(infer_request("m").SerializeToString(), timeout=SECONDS)
        return answer_value(pb.ModelInferResponse.FromString(reply))

    return ask


def ask_rest(session: aiohttp.ClientSession, port: int) -> Ask:
    url = f"http://127.0.0.1:{port}/v2/models/m/infer"
    body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [0]}]}

    async def ask() -> int:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            return int((await response.json())["outputs"][0]["data"][0])

    return ask


class Clients:
    """Ask without a pause until the block ends; every one keeps the versions that answered it."""

    def __init__(self, asks: list[Ask]) -> None:
        self.seen: list[list[int]] = [[] for _ in asks]
        self._stop = False
        self._tasks = [
            asyncio.create_task(self._run(*arguments)) for arguments in zip(asks, self.seen, strict=True)
        ]

    async def _run(self, ask: Ask, seen: list[int]) -> None:
        while not self._stop:
            seen.append(await ask())

    async def each_sees(self, version: int) -> None:
        """Every client has had an answer of this version."""
        await until(lambda: any(map(asyncio.Task.done, self._tasks)) or all(version in seen for seen in self.seen))

    async def stop(self) -> None:
        """Raise what a client came upon."""
        self._stop = True
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def clients_of(server: triglot.Server) -> AsyncIterator[Clients]:
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        aiohttp.ClientSession() as session,
    ):
        asks = [ask_grpc(channel), ask_rest(session, server.rest_port)] * (CLIENTS // 2)
        clients = Clients(asks)
        try:
            yield clients
        finally:
            await clients.stop()


async def swap_by_poll(manager: Manager, folder: Path, version: int) -> None:
    put(folder / str(version))
    await look_twice(manager)


async def swap_by_reload(manager: Manager, folder: Path, version: int) -> None:
    """The whole list is replaced; a model beside comes and goes."""
    put(folder / str(version))
    other_model = [ModelSettings("beside", folder)] if version % 2 else []
    await manager.reload([ModelSettings("m", folder), *other_model])


@pytest.mark.parametrize("kind", [Blocking, OnLoop])
@pytest.mark.parametrize("swap", [swap_by_poll, swap_by_reload])
async def test_versions_are_swapped_under_load(
    tmp_path: Path, swap: Callable[[Manager, Path, int], Coroutine[Any, Any, None]], kind: type[Numbered]
) -> None:
    load = Loads(kind)
    put(tmp_path / "1")
    async with serving(ModelSettings("m", tmp_path), load=load) as server, clients_of(server) as clients:
        for version in range(1, SWAPS + 1):
            await clients.each_sees(version)
            if version > 1:
                shutil.rmtree(tmp_path / str(version - 1))
            await swap(server.manager, tmp_path, version + 1)
        await clients.each_sees(SWAPS + 1)
        await clients.stop()
        for seen in clients.seen:
            # The new version takes over in one step: nobody who calls again sees the old one.
            assert seen == sorted(seen)
            assert set(seen) == set(range(1, SWAPS + 2))
        unloaded = dict.fromkeys(range(SWAPS, 0, -1), "UNAVAILABLE")
        await until(lambda: states(server.manager, "m") == {SWAPS + 1: "READY"} | unloaded)


async def test_a_version_that_moves_is_swapped_under_load(tmp_path: Path) -> None:
    """The same number from two places by turns, and between them one that cannot be loaded."""

    def tried(server: triglot.Server, place: str) -> bool:
        (version,) = server.manager.registry.statuses("m")
        is_bad = version.error is not None
        return version.files.file.is_relative_to(tmp_path / place) and is_bad == (place == "bad")

    load = Loads(OnLoop)
    for place in ("a", "b"):
        put(tmp_path / place / "1")
    put(tmp_path / "bad" / "1", "no disk")
    async with serving(ModelSettings("m", tmp_path / "a"), load=load) as server, clients_of(server) as clients:
        for turn in range(SWAPS):
            for place in ("bad", "ab"[(turn + 1) % 2]):
                await server.manager.reload([ModelSettings("m", tmp_path / place)])
                await until(lambda place=place: tried(server, place))  # type: ignore[misc]  # A default.
        await until(lambda: load.closed.total() == SWAPS)
        await clients.each_sees(1)
        assert {version for seen in clients.seen for version in seen} == {1}


async def test_loads_that_cross_each_other_under_load(tmp_path: Path) -> None:
    """Clients put versions beside each other and have them loaded, all at once; the highest is what stays."""
    load = Loads()
    put(tmp_path / "m" / "1")
    (tmp_path / "m" / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }")
    config = triglot.Config(grpc_port=0, rest_port=0, model_control_mode="explicit", load_model="m")

    async def install(server: triglot.Server, version: int) -> None:
        put(tmp_path / "m" / str(version))
        with suppress(Unavailable):  # Another one came before it was loaded.
            await server.manager.load_model("m")

    async with triglot.Server([tmp_path], config, load=load) as server, clients_of(server) as clients:
        for first in range(2, SWAPS, 3):
            await asyncio.gather(*[install(server, version) for version in range(first, first + 3)])
            await clients.each_sees(first + 2)
        await clients.stop()
        for seen in clients.seen:
            assert seen == sorted(seen)
        found = states(server.manager, "m")
        assert [version for version, state in found.items() if state == "READY"] == [first + 2]
        await until(lambda: set(states(server.manager, "m").values()) == {"READY", "UNAVAILABLE"})
    assert set(load.closed.values()) == {1}
    assert len(load.closed) == len(load.begun)


async def test_new_versions_are_found_by_polling(tmp_path: Path) -> None:
    load = Loads()
    put(tmp_path / "1")
    model = ModelSettings("m", tmp_path)
    async with serving(model, load=load, **OFTEN) as server, clients_of(server) as clients:
        for version in range(1, 4):
            await clients.each_sees(version)
            put(tmp_path / str(version + 1), "")
        await clients.each_sees(4)
        put(tmp_path / "5", "no disk")
        await until(lambda: states(server.manager, "m").get(5) == "no disk")
        put(tmp_path / "5")
        await clients.each_sees(5)


async def test_a_load_that_hangs_does_not_keep_the_server_from_stopping(tmp_path: Path) -> None:
    load = Loads()
    put(tmp_path / "1")
    gate = load.hold(f"load {tmp_path.name}/2")
    config = triglot.Config(**{"grpc_port": 0, "rest_port": 0} | OFTEN)
    async with triglot.Server(models=[ModelSettings("m", tmp_path)], config=config, load=load):
        put(tmp_path / "2")
        await until(lambda: f"{tmp_path.name}/2" in load.begun)
    assert load.closed == {f"{tmp_path.name}/1": 1}
    gate.set()
    await until(lambda: load.closed == {f"{tmp_path.name}/{version}": 1 for version in (1, 2)})


async def test_watchers_learn_of_models_that_come_and_go(tmp_path: Path) -> None:
    load = Loads()
    put(tmp_path / "1")
    watched = health_pb2.HealthCheckRequest(service="new")
    async with (
        serving(ModelSettings("m", tmp_path, ALL), load=load) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        statuses = aiter(health_pb2_grpc.HealthStub(channel).Watch(watched, timeout=SECONDS))
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await server.manager.reload([ModelSettings("new", tmp_path)])
        seen = [(await anext(statuses)).status]
        if seen == [health_pb2.HealthCheckResponse.NOT_SERVING]:
            seen = [(await anext(statuses)).status]
        assert seen == [health_pb2.HealthCheckResponse.SERVING]
        await server.manager.reload([])
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_every_change_is_announced(tmp_path: Path) -> None:
    load = Loads()
    put(tmp_path / "1")
    async with serving(ModelSettings("m", tmp_path), load=load) as server:
        for models in ([], [ModelSettings("m", tmp_path)]):
            waiting = asyncio.create_task(server.dataplane.readiness_changed(3600))
            await asyncio.sleep(0)
            await server.manager.reload(models)
            await asyncio.wait_for(waiting, SECONDS)


def test_paths_or_models(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected paths or models"):
        triglot.Server([tmp_path], models=[])
