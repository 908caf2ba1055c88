"""Loads that fail, and readiness: what a real reconciler logs, reports and frees.

test_reconciler_machine.py has the courses of events.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.repository.reconciling import files, reconciling, settled, state, wanted
from tests.repository.scripted_loads import SECONDS, Loads
from tests.waiting import until
from triglot import Model
from triglot.model.config import ModelConfig
from triglot.repository.manager.plan import State
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable


@pytest.fixture
def load() -> Loads:
    return Loads()


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
