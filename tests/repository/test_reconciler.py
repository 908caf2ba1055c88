"""Loads that fail, or that are no longer wanted when they end: a real reconciler, step by step."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from reconciling import files, reconciling, settled, state, wanted
from scripted_loads import SECONDS, Loads, ask

from triglot import Model
from triglot.model.config import ModelConfig
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable
from waiting import until


@pytest.fixture
def load() -> Loads:
    return Loads()


# --- what is wanted changes while a version loads ---


@asynccontextmanager
async def loading_again(
    load: Loads, first: ModelFiles, second: ModelFiles
) -> AsyncIterator[tuple[Reconciler, threading.Event]]:
    """Version 1 of "m" serves its first files, and is being loaded from the second; and what lets that end."""
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        yield reconciler, gate


async def test_a_reload_that_is_superseded_is_closed_and_never_serves(tmp_path: Path, load: Loads) -> None:
    first, second, third = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2, 3))
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        served = reconciler.registry.servable("m")
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want(wanted(third))
        assert reconciler.registry.servable("m") is served
        gate.set()
        await reconciler.wait_for(["m"])
        assert len(load.begun) == 3
        assert reconciler.registry.version("m", "1").files == third
        assert reconciler.registry.servable("m") is not served
        await until(lambda: load.closed["m/1"] == 2)


async def test_what_serves_is_wanted_again_while_its_successor_loads(tmp_path: Path, load: Loads) -> None:
    first, second = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2))
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        served = reconciler.registry.servable("m")
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want(wanted(first))
        gate.set()
        await reconciler.wait_for(["m"])
        await until(lambda: load.closed["m/1"] == 1)
        assert reconciler.registry.servable("m") is served
        assert len(load.begun) == 2, "there is nothing to load"


async def test_the_error_of_a_superseded_load_is_nobodys(tmp_path: Path, load: Loads) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    async with loading_again(load, first, second) as (reconciler, gate):
        reconciler.want(wanted(first))
        gate.set()
        await reconciler.wait_for(["m"])
        assert state(reconciler, 1) == (State.READY, "")


async def test_version_is_removed_while_it_is_reloaded(tmp_path: Path, load: Loads) -> None:
    """It goes at once; when it comes back in time, the load that runs is the one for it."""
    first, second = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2))
    async with loading_again(load, first, second) as (reconciler, gate):
        reconciler.want({"m": {}})
        assert state(reconciler, 1)[0] is State.UNLOADING
        await until(lambda: state(reconciler, 1) == (State.UNAVAILABLE, "unloaded"))
        assert load.closed["m/1"] == 1
        reconciler.want(wanted(second))
        gate.set()
        await reconciler.wait_for(["m"])
        assert state(reconciler, 1) == (State.READY, "")
        assert len(load.begun) == 2
        assert await ask(reconciler.registry.servable("m")) == 1
        assert load.closed["m/1"] == 1


async def test_version_stays_removed_after_its_reload(tmp_path: Path, load: Loads) -> None:
    first, second = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2))
    async with loading_again(load, first, second) as (reconciler, gate):
        reconciler.want({"m": {}})
        gate.set()
        await reconciler.wait_for(["m"])
        await until(lambda: load.closed["m/1"] == 2)
        await until(lambda: state(reconciler, 1) == (State.UNAVAILABLE, "unloaded"))


async def test_a_load_that_waits_for_room_begins_when_more_is_wanted(tmp_path: Path, load: Loads) -> None:
    """Without anything that has drained: what is wanted says how much room there is."""
    versions = {number: files(tmp_path, "m", number) for number in range(1, 6)}
    async with reconciling(load) as reconciler:
        await settled(reconciler, versions[1], versions[2])
        with reconciler.registry.servable("m", "1"), reconciler.registry.servable("m", "2"):
            await settled(reconciler, versions[3])
            reconciler.want(wanted(versions[3], versions[4]))
            await asyncio.sleep(0)
            assert state(reconciler, 4)[0] is State.START, "two drain"
            reconciler.want(wanted(versions[3], versions[4], versions[5]))
            await until(lambda: reconciler.registry.ready_versions("m") == [3, 5])
        await reconciler.wait_for(["m"])
        assert reconciler.registry.ready_versions("m") == [3, 4, 5]


# --- loads that fail ---


async def test_a_reload_that_fails_leaves_what_served(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        served = reconciler.registry.servable("m")
        await settled(reconciler, second)
        assert reconciler.registry.servable("m") is served
        assert state(reconciler, 1) == (State.READY, "no disk")
        assert "m version 1 could not be loaded: no disk" in caplog.messages
        assert reconciler.registry.all_ready()
        # Not tried again by itself, but when somebody asks for it.
        await settled(reconciler, second)
        assert len(load.begun) == 2
        second.file.write_text("")
        reconciler.retry("m")
        await settled(reconciler, second)
        assert state(reconciler, 1) == (State.READY, "")
        assert reconciler.registry.servable("m") is not served


async def test_a_reload_that_failed_is_tried_again_when_its_version_comes_back(
    tmp_path: Path, load: Loads
) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    other = files(tmp_path, "m", 2, "no disk either")
    async with reconciling(load) as reconciler:
        for step in (first, second, other):
            await settled(reconciler, step)
        assert state(reconciler, 1) == (State.READY, "no disk"), "it serves, since nothing else does"
        await settled(reconciler, second)
        assert load.begun == ["m/1", "m/1", "m/2", "m/1"]


async def test_what_is_not_wanted_stays_until_what_is_wanted_serves(tmp_path: Path, load: Loads) -> None:
    """Other files of the version that a policy keeps: while they load, and when they cannot be loaded."""
    old, first = files(tmp_path, "m", 1), files(tmp_path, "m", 2, stamp=1)
    second, third = files(tmp_path, "m", 2, "no disk", stamp=2), files(tmp_path, "m", 2, stamp=3)
    async with reconciling(load) as reconciler:
        await settled(reconciler, old, first)
        gate = load.hold("load m/2")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 3)
        reconciler.want(wanted(second))
        assert reconciler.registry.ready_versions("m") == [1, 2]
        gate.set()
        await reconciler.wait_for(["m"])
        assert reconciler.registry.ready_versions("m") == [1, 2]
        assert state(reconciler, 2) == (State.READY, "no disk")
        await settled(reconciler, third)
        assert reconciler.registry.ready_versions("m") == [2]
        assert state(reconciler, 2) == (State.READY, "")


async def test_error_of_a_reload_is_removed_with_its_version(tmp_path: Path, load: Loads) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        await settled(reconciler, second)
        reconciler.want({"m": {}})
        await until(lambda: state(reconciler, 1) == (State.UNAVAILABLE, "unloaded"))


class Odd(Model):
    """Declares what is invalid."""

    inputs = 5  # type: ignore[assignment]
    weights: object = None

    def __init__(self, closed: Callable[[], object]) -> None:
        self._closed = closed

    def infer(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs

    def close(self) -> None:
        self._closed()
        raise SystemExit(1)


@pytest.mark.parametrize("config", [ModelConfig(), ModelConfig(max_batch_size=4)])
async def test_a_class_that_cannot_be_served(tmp_path: Path, config: ModelConfig) -> None:
    closed = threading.Event()
    good = files(tmp_path, "m", 1)
    odd = ModelFiles(good.name, good.version, good.backend, good.file, config=config)
    async with reconciling(lambda *_: Odd(closed.set)) as reconciler:
        await settled(reconciler, odd)
        assert state(reconciler, 1)[0] is State.UNAVAILABLE
        assert state(reconciler, 1)[1].startswith(f"{good.file}: TypeError: ")
        assert await asyncio.to_thread(closed.wait, SECONDS)


class Weights:
    """What a load has in its hands when it fails."""


@pytest.mark.parametrize("fails", ["load", "warm", "configure"])
async def test_what_failed_is_freed_at_once(tmp_path: Path, fails: str) -> None:
    """Not when the garbage collector comes by: there may be no memory for the next version until then."""
    held: list[weakref.ref[object]] = []

    def load(backend: str, file: Path, config: ModelConfig) -> Model:
        weights, model = Weights(), Odd(lambda: None) if fails == "configure" else WithWeights()
        held.extend([weakref.ref(weights), weakref.ref(model)])
        model.weights = weights
        if fails == "load":
            raise OSError("no memory")
        return model

    async def warm(servable: Servable, files: ModelFiles) -> None:
        raise OSError("no memory")

    gc.disable()
    try:
        async with reconciling(load, warm=warm) as reconciler:
            await settled(reconciler, files(tmp_path, "m", 1))
            assert state(reconciler, 1)[0] is State.UNAVAILABLE
            await until(lambda: [reference() for reference in held] == [None, None])
    finally:
        gc.enable()


class WithWeights(Model):
    """Holds what is large."""

    any_tensors = True
    weights: object = None

    def infer(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs


# --- readiness ---


@pytest.mark.parametrize("may_be_empty", [True, False])
async def test_readiness_after_a_model_that_failed_was_unloaded(
    tmp_path: Path, load: Loads, *, may_be_empty: bool
) -> None:
    bad, good = files(tmp_path, "bad", 1, "no disk"), files(tmp_path, "good", 1)
    async with reconciling(load, may_be_empty=may_be_empty) as reconciler:
        await settled(reconciler, bad, good)
        assert not reconciler.registry.all_ready()
        reconciler.want({"bad": {}, **wanted(good)})
        assert reconciler.registry.all_ready() is may_be_empty


@pytest.mark.parametrize("may_be_empty", [True, False])
async def test_readiness_without_a_model(load: Loads, *, may_be_empty: bool) -> None:
    async with reconciling(load, may_be_empty=may_be_empty) as reconciler:
        reconciler.want({})
        assert reconciler.registry.all_ready() is may_be_empty


async def test_unchanged_scan_wakes_no_waiter(tmp_path: Path, load: Loads) -> None:
    bad, good = files(tmp_path, "bad", 1, "no disk"), files(tmp_path, "good", 1)
    changes = 0

    def count(_: str | None) -> None:
        nonlocal changes
        changes += 1

    async with reconciling(load) as reconciler:
        await settled(reconciler, bad, good)
        reconciler.registry.changes.subscribe(count)
        await settled(reconciler, bad, good)
        assert changes == 0
        reconciler.want(wanted(good))
        assert changes
