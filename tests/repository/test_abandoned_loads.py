"""A load that hangs and is no longer wanted, and a call that outlives the patience of a drain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from reconciling import files, reconciling, settled, state, wanted
from scripted_loads import SECONDS, Loads, ask

from direct_work import direct_infer
from triglot import Call, Model, TensorSpec
from triglot.model.config import ModelConfig
from triglot.repository.manager.plan import State
from waiting import until


async def test_a_load_that_hangs_does_not_keep_the_next_version(tmp_path: Path) -> None:
    load = Loads()
    old, hanging, new = (files(tmp_path, "m", version) for version in (1, 2, 3))
    async with reconciling(load, load_lock_timeout=0.01) as reconciler:
        await settled(reconciler, old)
        gate = load.hold("load m/2")
        reconciler.want(wanted(hanging))
        await until(lambda: "m/2" in load.begun)
        await settled(reconciler, new)
        assert await ask(reconciler.registry.servable("m")) == 3
        gate.set()
        await until(lambda: load.closed == {"m/1": 1, "m/2": 1})


async def test_a_load_that_hangs_does_not_keep_its_repaired_files(tmp_path: Path) -> None:
    load = Loads()
    hanging, repaired = files(tmp_path, "m", 1), files(tmp_path, "m", 1, stamp=7)
    async with reconciling(load, load_lock_timeout=0.01) as reconciler:
        gate = load.hold("load m/1")
        reconciler.want(wanted(hanging))
        await until(lambda: load.begun == ["m/1"])
        reconciler.want(wanted(repaired))
        await until(lambda: load.begun == ["m/1", "m/1"])
        gate.set()
        await until(lambda: reconciler.registry.ready_versions("m") == [1])
        await until(lambda: load.closed == {"m/1": 1})


async def test_a_load_that_hangs_and_is_unloaded(tmp_path: Path) -> None:
    load = Loads()
    async with reconciling(load, load_lock_timeout=0.01) as reconciler:
        load.hold("load m/1")
        reconciler.want(wanted(files(tmp_path, "m", 1)))
        await until(lambda: load.begun == ["m/1"])
        reconciler.want({"m": {}})
        await reconciler.wait_for(["m"])
        assert state(reconciler, 1) == (State.UNAVAILABLE, "unloaded")


class Lasting(Model):
    """Answers when the test lets it; fails when it is closed meanwhile."""

    inputs = [TensorSpec("x", "INT32", [1])]
    outputs = [TensorSpec("y", "INT32", [1])]

    def __init__(self) -> None:
        self.entered, self.go_on, self.closed = asyncio.Event(), asyncio.Event(), False

    async def infer(self, inputs: object) -> object:
        self.entered.set()
        await self.go_on.wait()
        assert not self.closed
        return {"y": np.zeros(1, np.int32)}

    def close(self) -> None:
        self.closed = True


async def test_code_on_the_loop_is_closed_when_its_last_call_has_ended(tmp_path: Path) -> None:
    model = Lasting()
    version = files(tmp_path, "m", 1)
    async with reconciling(lambda *_: model, drain_seconds=0.01) as reconciler:
        await settled(reconciler, version)

        async def call() -> object:
            with reconciler.registry.servable("m") as servable:
                return await direct_infer(servable, {"x": np.zeros(1, np.int32)}, Call())

        calling = asyncio.create_task(call())
        await asyncio.wait_for(model.entered.wait(), SECONDS)
        reconciler.want({})
        await until(lambda: state(reconciler, 1)[0] is State.UNAVAILABLE)
        assert not model.closed
        model.go_on.set()
        await asyncio.wait_for(calling, SECONDS)
        await until(lambda: model.closed)


@pytest.mark.parametrize("length", [1, 2])
async def test_causes_that_go_round_in_a_circle(tmp_path: Path, length: int) -> None:
    def load(backend: str, file: Path, config: ModelConfig) -> Model:
        first, second = ValueError("first"), ValueError("second")
        first.__cause__ = first if length == 1 else second
        second.__cause__ = first
        raise first

    async with reconciling(load) as reconciler:
        version = files(tmp_path, "m", 1)
        await asyncio.wait_for(settled(reconciler, version), SECONDS)
        assert state(reconciler, 1) == (State.UNAVAILABLE, f"{version.file}: ValueError: first")
