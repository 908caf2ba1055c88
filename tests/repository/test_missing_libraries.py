"""Libraries that are not installed, and what a reconciler does about models that need them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.repository.reconciling import files, reconciling, settled, state
from tests.repository.scripted_loads import Loads
from triglot import Model
from triglot.core.errors import MissingDependency
from triglot.model.config import ModelConfig
from triglot.repository.manager.plan import State


@pytest.fixture
def load() -> Loads:
    return Loads()


class Missing:
    """Loads what needs no library; the file's text is the library that a model needs."""

    def __init__(self, load: Loads) -> None:
        self._load = load

    def __call__(self, backend: str, file: Path, config: ModelConfig) -> Model:
        if text := file.read_text():
            raise MissingDependency(text)
        return self._load(backend, file, config)


async def test_what_needs_a_library_is_left_out(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    here, missing = files(tmp_path, "here", 1), files(tmp_path, "missing", 1, "needs torch")
    async with reconciling(Missing(load), skip_missing_dependencies=True) as reconciler:
        await settled(reconciler, here, missing)
        assert reconciler.registry.names() == ["here"]
        assert reconciler.registry.all_ready()
        assert caplog.messages == ["missing version 1 is skipped: needs torch"]
        await settled(reconciler, here, missing)
        assert caplog.messages == ["missing version 1 is skipped: needs torch"]
        # Other files are another model.
        await settled(reconciler, here, files(tmp_path, "missing", 1, stamp=7))
        assert reconciler.registry.ready_versions("missing") == [1]


async def test_what_serves_does_not_go_for_want_of_a_library(tmp_path: Path, load: Loads) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "needs torch", stamp=2)
    new = files(tmp_path, "m", 2, "needs torch, too")
    async with reconciling(Missing(load), skip_missing_dependencies=True) as reconciler:
        await settled(reconciler, first)
        served = reconciler.registry.servable("m")
        await settled(reconciler, second)
        assert state(reconciler, 1) == (State.READY, "needs torch")
        await settled(reconciler, new)
        assert state(reconciler, 2) == (State.UNAVAILABLE, "needs torch, too")
        assert reconciler.registry.servable("m") is served


async def test_requested_model_is_not_skipped(tmp_path: Path, load: Loads) -> None:
    missing = files(tmp_path, "m", 1, "needs torch")
    async with reconciling(Missing(load), skip_missing_dependencies=True) as reconciler:
        await settled(reconciler, missing)
        assert reconciler.registry.names() == []
        reconciler.retry("m")
        await settled(reconciler, missing)
        assert reconciler.registry.names() == ["m"]
        assert state(reconciler, 1) == (State.UNAVAILABLE, "needs torch")
        missing.file.write_text("")
        reconciler.retry("m")
        await settled(reconciler, missing)
        assert reconciler.registry.ready_versions("m") == [1]
