"""Loads and warm-ups that hang or raise anything, and a reconciler that is closed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.repository.reconciling import LONG, files, reconciling, settled, state, wanted
from tests.repository.scripted_loads import SECONDS, Loads, ask
from tests.waiting import until
from triglot import ModelLoadError
from triglot.core.errors import Code, ServingError
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

SHORT = 0.05
"""Seconds that a load may take that never ends."""


@pytest.fixture
def load() -> Loads:
    return Loads()


async def too_late(reconciler: Reconciler, version: ModelFiles, hangs: Callable[[], bool]) -> None:
    """Want this version, and wait until it has failed, for it takes too long. The limit holds once it hangs."""
    reconciler.want(wanted(version))
    await until(hangs)
    reconciler.load_timeout = SHORT
    await settled(reconciler, version)
    reconciler.load_timeout = LONG


# --- loads that hang ---


async def test_a_load_that_hangs_fails_and_what_comes_of_it_is_closed(tmp_path: Path, load: Loads) -> None:
    old, new, newer = (files(tmp_path, "m", version) for version in (1, 2, 3))
    async with reconciling(load) as reconciler:
        await settled(reconciler, old)
        gate = load.hold("load m/2")
        await too_late(reconciler, new, lambda: load.begun == ["m/1", "m/2"])
        (error,) = (status.error for status in reconciler.registry.statuses("m") if status.error is not None)
        assert error.code is Code.DEADLINE_EXCEEDED
        assert error.message == f"{new.file}: loading took longer than load_timeout, 0.05 s"
        assert state(reconciler, 2) == (State.UNAVAILABLE, error.message)
        assert await ask(reconciler.registry.servable("m")) == 1
        # The next one does not wait for it.
        await settled(reconciler, newer)
        assert reconciler.registry.ready_versions("m") == [3]
        await until(lambda: load.closed == {"m/1": 1})
        gate.set()
        await until(lambda: load.closed == {"m/1": 1, "m/2": 1})
        assert reconciler.registry.ready_versions("m") == [3]


async def test_a_load_that_hangs_lets_other_models_load(tmp_path: Path, load: Loads) -> None:
    hanging, other = files(tmp_path, "a", 1), files(tmp_path, "b", 1)
    async with reconciling(load, load_lock_timeout=0.01) as reconciler:
        gate = load.hold("load a/1")
        reconciler.want(wanted(hanging))
        await until(lambda: load.begun == ["a/1"])
        reconciler.want(wanted(hanging, other))
        await reconciler.wait_for(["b"])
        assert reconciler.registry.ready_versions("b") == [1]
        assert state(reconciler, 1, "a")[0] is State.LOADING
        # Again and again, until it ends by itself.
        held = load.hold("load b/1")
        reconciler.want(wanted(hanging, files(tmp_path, "b", 1, stamp=5)))
        await until(lambda: load.begun == ["a/1", "b/1", "b/1"])
        gate.set()
        await reconciler.wait_for(["a"])
        assert reconciler.registry.ready_versions("a") == [1]
        held.set()


async def test_load_blocks_others_only_within_its_timeout(tmp_path: Path, load: Loads) -> None:
    async with reconciling(load) as reconciler:
        gate = load.hold("load a/1")
        reconciler.want(wanted(files(tmp_path, "a", 1), files(tmp_path, "b", 1)))
        await until(lambda: load.begun == ["a/1"])
        assert state(reconciler, 1, "b")[0] is State.START
        gate.set()
        await reconciler.wait_for(["a", "b"])
        assert load.begun == ["a/1", "b/1"]


# --- warming ---


class Warming:
    """Warms the versions, and hangs with one of them until the test lets it continue."""

    def __init__(self, version: int, *, stubborn: bool = False) -> None:
        self._version = version
        self._stubborn = stubborn
        self.begun, self.go, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, servable: Servable, files: ModelFiles) -> None:
        if files.version != self._version:
            return
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            if not self._stubborn:
                raise
            await self.go.wait()


async def test_a_warm_up_that_hangs(tmp_path: Path, load: Loads) -> None:
    warm = Warming(2)
    async with reconciling(load, warm=warm) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        await too_late(reconciler, files(tmp_path, "m", 2), warm.begun.is_set)
        assert warm.cancelled.is_set()
        assert state(reconciler, 2)[1].endswith("loading took longer than load_timeout, 0.05 s")
        assert reconciler.registry.ready_versions("m") == [1]
        await until(lambda: load.closed == {"m/2": 1})


async def test_a_warm_up_that_does_not_care(tmp_path: Path, load: Loads) -> None:
    """Its version never serves; it is closed when the warm-up ends in the end."""
    warm = Warming(2, stubborn=True)
    async with reconciling(load, warm=warm) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        await too_late(reconciler, files(tmp_path, "m", 2), warm.begun.is_set)
        assert state(reconciler, 2)[0] is State.UNAVAILABLE
        warm.go.set()
        await until(lambda: load.closed == {"m/2": 1})
        await settled(reconciler, files(tmp_path, "m", 3))
        assert reconciler.registry.ready_versions("m") == [3]


@pytest.mark.parametrize(
    ("raised", "text", "code"),
    [
        (asyncio.CancelledError(), "{file}: its code raised CancelledError", Code.UNKNOWN),
        (SystemExit(1), "SystemExit: 1", Code.UNKNOWN),
        (ServingError("too large", code=Code.OUT_OF_RANGE), "too large", Code.OUT_OF_RANGE),
        (ModelLoadError("no disk", Code.DATA_LOSS), "no disk", Code.DATA_LOSS),
    ],
)
async def test_whatever_a_warm_up_raises(
    tmp_path: Path, load: Loads, raised: BaseException, text: str, code: Code
) -> None:
    async def warm(servable: Servable, files: ModelFiles) -> None:
        raise raised

    model_files = files(tmp_path, "m", 1)
    async with reconciling(load, warm=warm) as reconciler:
        await settled(reconciler, model_files)
        (version,) = reconciler.registry.statuses("m")
        assert version.reason == text.format(file=model_files.file)
        assert version.error is not None
        assert version.error.code is code
        assert load.closed == {"m/1": 1}


# --- the end ---


async def test_closing_while_a_version_loads(tmp_path: Path, load: Loads) -> None:
    async with reconciling(load) as reconciler:
        gate = load.hold("load m/1")
        reconciler.want(wanted(files(tmp_path, "m", 1)))
        await until(lambda: load.begun == ["m/1"])
        await reconciler.close()
        assert state(reconciler, 1) == (State.UNAVAILABLE, "unloaded")
        gate.set()
        await until(lambda: load.closed == {"m/1": 1})


async def test_closing_while_a_version_is_warmed(tmp_path: Path, load: Loads) -> None:
    warm = Warming(1)
    async with reconciling(load, warm=warm) as reconciler:
        reconciler.want(wanted(files(tmp_path, "m", 1)))
        await asyncio.wait_for(warm.begun.wait(), SECONDS)
        await reconciler.close()
        assert load.closed == {"m/1": 1}


async def test_closing_in_the_turn_in_which_a_version_has_loaded(tmp_path: Path, load: Loads) -> None:
    closing: list[asyncio.Task[None]] = []

    async def warm(servable: Servable, files: ModelFiles) -> None:
        closing.append(asyncio.create_task(reconciler.close()))

    async with reconciling(load, warm=warm) as reconciler:
        reconciler.want(wanted(files(tmp_path, "m", 1)))
        await until(lambda: bool(closing))
        await closing[0]
        await until(lambda: load.closed == {"m/1": 1})


@pytest.mark.parametrize("turns", range(6))
async def test_closing_soon_after_a_version_has_loaded(tmp_path: Path, load: Loads, turns: int) -> None:
    """In whatever turn of the loop it comes: what was loaded is closed, once."""
    warmed = asyncio.Event()

    async def warm(servable: Servable, files: ModelFiles) -> None:
        warmed.set()

    async with reconciling(load, warm=warm) as reconciler:
        reconciler.want(wanted(files(tmp_path, "m", 1)))
        await asyncio.wait_for(warmed.wait(), SECONDS)
        for _ in range(turns):
            await asyncio.sleep(0)
        await reconciler.close()
        assert load.closed == {"m/1": 1}


async def test_closing_while_a_version_drains(tmp_path: Path, load: Loads) -> None:
    async with reconciling(load) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        with reconciler.registry.servable("m"):
            await settled(reconciler, files(tmp_path, "m", 2))
            reconciler.want(wanted(files(tmp_path, "m", 3)))
            await asyncio.wait_for(reconciler.close(), SECONDS)
        assert load.closed == {"m/1": 1, "m/2": 1}
        assert load.begun == ["m/1", "m/2"]
