"""Loads that hang, fail, come too late or are not wanted any more: a real reconciler, step by step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_loads import SECONDS, Loads, ask, until

from triglot import Model, ModelLoadError
from triglot.core.errors import Code, MissingDependency, ServingError
from triglot.core.model_config import ModelConfig
from triglot.engine.servable import Servable
from triglot.repository.plan import State
from triglot.repository.reconciler import Reconciler
from triglot.repository.source import ModelFiles

LONG = 3600.0


def files(folder: Path, model: str, version: int, text: str = "", stamp: int = 0) -> ModelFiles:
    """A version on disk; with a text, it cannot be loaded, and this is why."""
    file = folder / (f"stamp{stamp}" if stamp else "") / model / str(version) / "model.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return ModelFiles(model, version, "python", file, stamp)


def wanted(*versions: ModelFiles) -> dict[str, dict[int, ModelFiles]]:
    models: dict[str, dict[int, ModelFiles]] = {}
    for version in versions:
        models.setdefault(version.name, {})[version.version] = version
    return models


@asynccontextmanager
async def reconciling(load: Callable[..., Model], **options: Any) -> AsyncIterator[Reconciler]:
    defaults = {
        "warm": None,
        "max_queue_size": 10,
        "skip_missing_dependencies": False,
        "load_timeout": 0.0,
        "drain_seconds": LONG,
        "labels_before_load": False,
        "may_be_empty": True,
        "load_patience": LONG,
    }
    reconciler = Reconciler(load, **defaults | options)
    try:
        yield reconciler
    finally:
        if isinstance(load, Loads):
            load.open_all()
        await reconciler.close()


async def settled(reconciler: Reconciler, *versions: ModelFiles) -> None:
    """Want these versions, and wait until that is done."""
    reconciler.want(wanted(*versions))
    await reconciler.wait_for({version.name for version in versions})


def state(reconciler: Reconciler, version: int, model: str = "m") -> tuple[State, str]:
    """The state of a version, and the reason."""
    return next((one.state, one.reason) for one in reconciler.statuses(model) if one.files.version == version)


@pytest.fixture
def load() -> Loads:
    return Loads()


# --- what is wanted changes while a version loads ---


async def test_a_reload_that_is_superseded_is_closed_and_never_serves(tmp_path: Path, load: Loads) -> None:
    first, second, third = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2, 3))
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        served = reconciler.servable("m")
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want(wanted(third))
        assert reconciler.servable("m") is served
        gate.set()
        await reconciler.wait_for(["m"])
        assert len(load.begun) == 3
        assert reconciler.version("m", "1").files == third
        assert reconciler.servable("m") is not served
        await until(lambda: load.closed["m/1"] == 2)


async def test_what_serves_is_wanted_again_while_its_successor_loads(tmp_path: Path, load: Loads) -> None:
    first, second = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2))
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        served = reconciler.servable("m")
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want(wanted(first))
        gate.set()
        await reconciler.wait_for(["m"])
        await until(lambda: load.closed["m/1"] == 1)
        assert reconciler.servable("m") is served
        assert len(load.begun) == 2, "there is nothing to load"


async def test_the_error_of_a_superseded_load_is_nobodys(tmp_path: Path, load: Loads) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want(wanted(first))
        gate.set()
        await reconciler.wait_for(["m"])
        assert state(reconciler, 1) == (State.READY, "")


async def test_a_version_that_goes_while_it_is_loaded_again(tmp_path: Path, load: Loads) -> None:
    """It goes at once; when it comes back in time, the load that runs is the one for it."""
    first, second = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2))
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want({"m": {}})
        assert state(reconciler, 1)[0] is State.UNLOADING
        await until(lambda: load.closed["m/1"] == 1)
        assert state(reconciler, 1) == (State.UNAVAILABLE, "unloaded")
        reconciler.want(wanted(second))
        gate.set()
        await reconciler.wait_for(["m"])
        assert state(reconciler, 1) == (State.READY, "")
        assert len(load.begun) == 2
        assert await ask(reconciler.servable("m")) == 1
        assert load.closed["m/1"] == 1


async def test_a_version_that_goes_while_it_is_loaded_again_and_stays_away(tmp_path: Path, load: Loads) -> None:
    first, second = (files(tmp_path, "m", 1, stamp=stamp) for stamp in (1, 2))
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        gate = load.hold("load m/1")
        reconciler.want(wanted(second))
        await until(lambda: len(load.begun) == 2)
        reconciler.want({"m": {}})
        gate.set()
        await reconciler.wait_for(["m"])
        await until(lambda: load.closed["m/1"] == 2)
        assert state(reconciler, 1) == (State.UNAVAILABLE, "unloaded")


async def test_a_load_that_waits_for_room_begins_when_more_is_wanted(tmp_path: Path, load: Loads) -> None:
    """Without anything that has drained: what is wanted says how much room there is."""
    versions = {number: files(tmp_path, "m", number) for number in range(1, 6)}
    async with reconciling(load) as reconciler:
        await settled(reconciler, versions[1], versions[2])
        with reconciler.servable("m", "1"), reconciler.servable("m", "2"):
            await settled(reconciler, versions[3])
            reconciler.want(wanted(versions[3], versions[4]))
            await asyncio.sleep(0)
            assert state(reconciler, 4)[0] is State.START, "two drain"
            await settled(reconciler, versions[3], versions[4], versions[5])
            assert reconciler.ready_versions("m") == [3, 5]
        await reconciler.wait_for(["m"])
        assert reconciler.ready_versions("m") == [3, 4, 5]


# --- loads that fail ---


async def test_a_reload_that_fails_leaves_what_served(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        served = reconciler.servable("m")
        await settled(reconciler, second)
        assert reconciler.servable("m") is served
        assert state(reconciler, 1) == (State.READY, "no disk")
        assert "no disk" in caplog.messages
        assert reconciler.all_ready()
        # Not tried again by itself, but when somebody asks for it.
        await settled(reconciler, second)
        assert len(load.begun) == 2
        second.file.write_text("")
        reconciler.retry("m")
        await settled(reconciler, second)
        assert state(reconciler, 1) == (State.READY, "")
        assert reconciler.servable("m") is not served


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


async def test_the_error_of_a_reload_goes_with_its_version(tmp_path: Path, load: Loads) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "no disk", stamp=2)
    async with reconciling(load) as reconciler:
        await settled(reconciler, first)
        await settled(reconciler, second)
        reconciler.want({"m": {}})
        await until(lambda: state(reconciler, 1) == (State.UNAVAILABLE, "unloaded"))


class Odd(Model):
    """Declares what nobody can declare."""

    inputs = 5  # type: ignore[assignment]

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
    one = files(tmp_path, "m", 1)
    odd = ModelFiles(one.name, one.version, one.backend, one.file, config=config)
    async with reconciling(lambda *_: Odd(closed.set)) as reconciler:
        await settled(reconciler, odd)
        assert state(reconciler, 1)[0] is State.UNAVAILABLE
        assert state(reconciler, 1)[1].startswith(f"{one.file}: TypeError: ")
        assert await asyncio.to_thread(closed.wait, SECONDS)


# --- loads that hang ---


async def test_a_load_that_hangs_fails_and_what_comes_of_it_is_closed(tmp_path: Path, load: Loads) -> None:
    old, new, newer = (files(tmp_path, "m", version) for version in (1, 2, 3))
    async with reconciling(load, load_timeout=0.05) as reconciler:
        await settled(reconciler, old)
        gate = load.hold("load m/2")
        await settled(reconciler, new)
        (error,) = (one.error for one in reconciler.statuses("m") if one.error is not None)
        assert error.code is Code.DEADLINE_EXCEEDED
        assert error.message == f"{new.file}: it was not loaded within 0.05 s"
        assert state(reconciler, 2) == (State.UNAVAILABLE, error.message)
        assert await ask(reconciler.servable("m")) == 1
        # The next one does not wait for it.
        await settled(reconciler, newer)
        assert reconciler.ready_versions("m") == [3]
        await until(lambda: load.closed == {"m/1": 1})
        gate.set()
        await until(lambda: load.closed == {"m/1": 1, "m/2": 1})
        assert reconciler.ready_versions("m") == [3]


async def test_a_load_that_hangs_lets_other_models_load(tmp_path: Path, load: Loads) -> None:
    hanging, other = files(tmp_path, "a", 1), files(tmp_path, "b", 1)
    async with reconciling(load, load_patience=0.01) as reconciler:
        gate = load.hold("load a/1")
        reconciler.want(wanted(hanging, other))
        await reconciler.wait_for(["b"])
        assert reconciler.ready_versions("b") == [1]
        assert state(reconciler, 1, "a")[0] is State.LOADING
        await settled(reconciler, hanging, files(tmp_path, "b", 1, stamp=5), files(tmp_path, "c", 1))
        assert load.begun == ["a/1", "b/1"]
        gate.set()


async def test_a_load_keeps_the_others_from_loading_while_there_is_patience(tmp_path: Path, load: Loads) -> None:
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
    """Warms the versions, and hangs with one of them until it is told to go on."""

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
    async with reconciling(load, warm=warm, load_timeout=0.05) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        await settled(reconciler, files(tmp_path, "m", 2))
        assert warm.cancelled.is_set()
        assert state(reconciler, 2)[1].endswith("it was not loaded within 0.05 s")
        assert reconciler.ready_versions("m") == [1]
        await until(lambda: load.closed == {"m/2": 1})


async def test_a_warm_up_that_does_not_care(tmp_path: Path, load: Loads) -> None:
    """Its version never serves; it is closed when the warm-up ends in the end."""
    warm = Warming(2, stubborn=True)
    async with reconciling(load, warm=warm, load_timeout=0.05) as reconciler:
        await settled(reconciler, files(tmp_path, "m", 1))
        await settled(reconciler, files(tmp_path, "m", 2))
        assert state(reconciler, 2)[0] is State.UNAVAILABLE
        warm.go.set()
        await until(lambda: load.closed == {"m/2": 1})
        await settled(reconciler, files(tmp_path, "m", 3))
        assert reconciler.ready_versions("m") == [3]


@pytest.mark.parametrize(
    ("raised", "text", "code"),
    [
        (asyncio.CancelledError(), "{file}: CancelledError: ", Code.UNKNOWN),
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

    one = files(tmp_path, "m", 1)
    async with reconciling(load, warm=warm) as reconciler:
        await settled(reconciler, one)
        (version,) = reconciler.statuses("m")
        assert version.reason == text.format(file=one.file)
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
        with reconciler.servable("m"):
            await settled(reconciler, files(tmp_path, "m", 2))
            reconciler.want(wanted(files(tmp_path, "m", 2), files(tmp_path, "m", 3)))
            await asyncio.wait_for(reconciler.close(), SECONDS)
        assert {number: count for number, count in load.closed.items() if count} == {"m/1": 1, "m/2": 1}


# --- libraries that are not installed ---


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
        assert reconciler.names() == ["here"]
        assert reconciler.all_ready()
        assert caplog.messages == ["missing version 1 is left out: needs torch"]
        await settled(reconciler, here, missing)
        assert caplog.messages == ["missing version 1 is left out: needs torch"]
        # Other files are another model.
        await settled(reconciler, here, files(tmp_path, "missing", 1, stamp=7))
        assert reconciler.ready_versions("missing") == [1]


async def test_what_serves_does_not_go_for_want_of_a_library(tmp_path: Path, load: Loads) -> None:
    first, second = files(tmp_path, "m", 1, stamp=1), files(tmp_path, "m", 1, "needs torch", stamp=2)
    new = files(tmp_path, "m", 2, "needs torch, too")
    async with reconciling(Missing(load), skip_missing_dependencies=True) as reconciler:
        await settled(reconciler, first)
        served = reconciler.servable("m")
        await settled(reconciler, second)
        assert state(reconciler, 1) == (State.READY, "needs torch")
        await settled(reconciler, new)
        assert state(reconciler, 2) == (State.UNAVAILABLE, "needs torch, too")
        assert reconciler.servable("m") is served


async def test_what_somebody_asks_for_is_not_left_out(tmp_path: Path, load: Loads) -> None:
    missing = files(tmp_path, "m", 1, "needs torch")
    async with reconciling(Missing(load), skip_missing_dependencies=True) as reconciler:
        await settled(reconciler, missing)
        assert reconciler.names() == []
        reconciler.retry("m")
        await settled(reconciler, missing)
        assert state(reconciler, 1) == (State.UNAVAILABLE, "needs torch")
        missing.file.write_text("")
        reconciler.retry("m")
        await settled(reconciler, missing)
        assert reconciler.ready_versions("m") == [1]
