"""Loads that fail are tried again, so often and so late as options say."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.repository.reconciling import LONG, files, reconciling, settled, state, wanted
from tests.repository.scanning_server import replace
from tests.repository.scripted_loads import Loads, ask, look_twice, managing, put, states
from tests.waiting import until
from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.repository.manager.plan import State


class Mending(Loads):
    """Its loads fail until so many have begun."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self._failures = failures

    def __call__(self, backend: str, file: Path, config: ModelConfig) -> Model:
        model = super().__call__(backend, file, config)
        if len(self.begun) <= self._failures:
            raise ModelLoadError(f"no disk ({len(self.begun)})")
        return model


@pytest.mark.parametrize(("failures", "retries", "tries"), [(2, 3, 3), (2, 2, 3), (2, 1, 2), (2, 0, 1), (0, 3, 1)])
async def test_a_load_is_tried_again_so_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failures: int, retries: int, tries: int
) -> None:
    load = Mending(failures)
    async with reconciling(load, load_retries=retries, load_retry_interval=0.001) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        assert len(load.begun) == tries
        served = tries > failures
        assert state(reconciler, 1) == ((State.READY, "") if served else (State.UNAVAILABLE, f"no disk ({tries})"))
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert texts == [
        f"m version 1 could not be loaded: no disk ({number})"
        + (f"; retry {number} of {retries} in 0.001 s" if number <= retries else "")
        for number in range(1, min(failures, tries) + 1)
    ]


async def test_others_load_while_one_waits_and_new_files_are_taken_at_once(tmp_path: Path) -> None:
    load = Loads()
    broken, mended = files(tmp_path, "m", 2, "no disk"), files(tmp_path, "m", 2, stamp=1)
    below, other = files(tmp_path, "m", 1), files(tmp_path, "other", 1)
    async with reconciling(load, load_retries=1, load_retry_interval=LONG) as reconciler:
        reconciler.want(wanted(broken, below, other))
        await until(lambda: sorted(load.begun) == ["m/1", "m/2", "other/1"] and reconciler.busy() == set())
        assert "m" in reconciler.workers
        assert state(reconciler, 1) == (State.READY, "")
        reconciler.want(wanted(mended, below, other))
        await reconciler.wait_for(["m"])
        assert state(reconciler, 2) == (State.READY, "")


async def test_what_is_not_wanted_any_more_is_not_tried_again(tmp_path: Path) -> None:
    load = Loads()
    async with reconciling(load, load_retries=1, load_retry_interval=LONG) as reconciler:
        reconciler.want(wanted(files(tmp_path, "m", 1, "no disk")))
        await until(lambda: state(reconciler, 1) == (State.UNAVAILABLE, "no disk") and not reconciler.busy())
        reconciler.want({"m": {}})
        await reconciler.wait_for(["m"])
        assert len(load.begun) == 1


async def test_new_files_begin_to_count_anew(tmp_path: Path) -> None:
    load = Loads()
    async with reconciling(load, load_retries=1, load_retry_interval=0.001) as reconciler:
        for stamp in (1, 2):
            await settled(reconciler, files(tmp_path, "m", 1, "no disk", stamp))
            assert len(load.begun) == 2 * stamp


async def test_a_missing_library_is_not_tried_again(tmp_path: Path) -> None:
    tries = []

    def load(backend: str, file: Path, config: ModelConfig) -> Model:
        tries.append(file)
        raise MissingDependency("run: pip install it")

    async with reconciling(load, load_retries=3) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        assert len(tries) == 1


async def test_serving_version_continues_while_its_successor_is_retried(tmp_path: Path) -> None:
    """And files that are mended meanwhile are seen."""
    load = Loads()
    put(tmp_path / "m" / "1")
    async with managing(tmp_path, load=load, load_retries=1, load_retry_interval=LONG) as manager:
        put(tmp_path / "m" / "2", "no disk")
        await look_twice(manager)
        await until(lambda: states(manager, "m") == {2: "no disk", 1: "READY"})
        assert await ask(manager.registry.servable("m")) == 1
        replace(tmp_path / "m" / "2" / "model.py", "")
        await look_twice(manager)
        await until(lambda: states(manager, "m") == {2: "READY", 1: "READY"})
