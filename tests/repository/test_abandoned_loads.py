"""A load that hangs and is no longer wanted, and a call that outlives the patience of a drain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.repository.reconciling import files, reconciling, settled, state, wanted
from tests.repository.scripted_loads import SECONDS, Loads, ask
from tests.waiting import until
from triglot import Call, Model, TensorSpec
from triglot.model.config import ModelConfig
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import LoadLock


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


# --- one load at a time, and no holder waits for ever ---


LONG = 3600.0


class Holder:
    """Takes its turn, and keeps it until the test ends it."""

    def __init__(self, turns: LoadLock) -> None:
        self.has_it = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._hold(turns))

    async def _hold(self, turns: LoadLock) -> None:
        async with turns.hold():
            self.has_it.set()
            await self.end.wait()

    async def wait_ended(self) -> None:
        self.end.set()
        await asyncio.wait_for(self.task, SECONDS)


async def test_one_at_a_time_in_the_order_that_they_came() -> None:
    turns = LoadLock(LONG)
    holders = [Holder(turns) for _ in range(3)]
    for number, holder in enumerate(holders):
        await asyncio.wait_for(holder.has_it.wait(), SECONDS)
        assert [task.has_it.is_set() for task in holders] == [index <= number for index in range(3)]
        await holder.wait_ended()


async def test_one_that_takes_long_lets_the_next_in() -> None:
    turns = LoadLock(0.01)
    slow, next_holder = Holder(turns), Holder(turns)
    await asyncio.wait_for(next_holder.has_it.wait(), SECONDS)
    assert not slow.task.done()
    await slow.wait_ended()
    # Its end is no turn for anybody: that was given away already.
    await next_holder.wait_ended()


async def test_the_end_of_a_slow_one_does_not_end_the_turn_of_another() -> None:
    turns = LoadLock(0.01)
    slow, other = Holder(turns), Holder(turns)
    await asyncio.wait_for(other.has_it.wait(), SECONDS)
    turns.timeout = LONG
    await slow.wait_ended()
    last = Holder(turns)
    third = Holder(turns)
    await asyncio.wait_for(last.has_it.wait(), SECONDS)
    await slow.wait_ended()
    assert not third.has_it.is_set()
    await other.wait_ended()
    assert not third.has_it.is_set()
    await last.wait_ended()
    await asyncio.wait_for(third.has_it.wait(), SECONDS)
    await third.wait_ended()


async def test_who_leaves_gives_it_back() -> None:
    turns = LoadLock(LONG)
    holder, waiting, last = Holder(turns), Holder(turns), Holder(turns)
    await asyncio.wait_for(holder.has_it.wait(), SECONDS)
    waiting.task.cancel()
    await until(waiting.task.done)
    holder.task.cancel()
    await asyncio.wait_for(last.has_it.wait(), SECONDS)
    assert not waiting.has_it.is_set()
    await last.wait_ended()
