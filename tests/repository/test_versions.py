"""Versions that come, take over and go while calls run: polling, warm-up, draining, failing, closing."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from tests.repository.scripted_loads import Loads, ask, look_twice, managing, put, states
from tests.waiting import until
from triglot.core.errors import InvalidArgument, ModelLoadError, ModelNotFound, Unavailable
from triglot.model.config import ALL, LATEST, ModelConfig, VersionPolicy
from triglot.model.model import Model
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.registry import ENDED_KEPT


@pytest.fixture
def load() -> Loads:
    return Loads()


def model(folder: Path, policy: VersionPolicy = LATEST, **labels: int) -> ModelSettings:
    return ModelSettings("m", folder, policy, labels)


# --- the start ---


async def test_only_what_the_policy_wants_is_loaded(tmp_path: Path, load: Loads) -> None:
    for version in ("1", "2", "3"):
        put(tmp_path / version)
    async with managing(model(tmp_path, VersionPolicy(latest=2)), load=load) as manager:
        assert states(manager, "m") == {3: "READY", 2: "READY"}
        assert [path.rpartition("/")[2] for path in load.begun] == ["3", "2"]
        assert await ask(manager.registry.servable("m")) == 3
        assert manager.registry.ready_versions("m") == [2, 3]
        with pytest.raises(ModelNotFound, match="version 1 is not found"):
            manager.registry.servable("m", "1")


async def test_version_0_and_leading_zeros(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "0")
    put(tmp_path / "007")
    async with managing(model(tmp_path, ALL), load=load) as manager:
        assert [await ask(manager.registry.servable("m", version)) for version in ("", "0", "7")] == [7, 0, 7]
        for wrong in ("007", "00", "-1", str(2**63)):
            with pytest.raises(InvalidArgument, match="expected a positive integer"):
                manager.registry.servable("m", wrong)


async def test_what_is_wrong_at_the_start(tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "good" / "1")
    put(tmp_path / "bad" / "1", "no disk")
    models = [
        ModelSettings("good", tmp_path / "good", labels={"stable": 1, "canary": 2}),
        ModelSettings("bad", tmp_path / "bad"),
        ModelSettings("gone", tmp_path / "gone"),
    ]
    manager = Manager(models, load, max_queue_size=1)
    texts = [str(error) for error in await manager.load_all()]
    assert texts == [
        "no disk",
        f"Could not find base path {tmp_path / 'gone'} for servable gone",
        "Request to assign label to version 2 of model good, which is not currently available for inference",
    ]
    logged = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert logged == [f"bad version 1 could not be loaded: {texts[0]}", *texts[1:]]
    assert manager.registry.names() == ["good", "bad", "gone"]
    assert not manager.registry.all_ready()
    assert [manager.registry.is_ready(name) for name in manager.registry.names()] == [True, False, False]
    # The labels stand: the version may still come.
    assert [manager.registry.labelled("good", label) for label in ("stable", "canary")] == [1, 2]
    await manager.close()


async def test_labels_before_their_version_at_the_start(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "1")
    manager = Manager([model(tmp_path, next=2)], load, max_queue_size=1, labels_before_load=True)
    assert await manager.load_all() == []
    await manager.close()


@pytest.mark.parametrize("names", [["two words"], ["m", "m"]])
async def test_names_that_cannot_be(tmp_path: Path, load: Loads, names: list[str]) -> None:
    manager = Manager([ModelSettings(name, tmp_path) for name in names], load, max_queue_size=1)
    with pytest.raises(ModelLoadError):
        await manager.load_all()
    assert load.begun == []


# --- new versions ---


async def test_a_new_version_takes_over_and_the_old_one_drains(tmp_path: Path, load: Loads) -> None:
    name = tmp_path.name
    put(tmp_path / "1")
    async with managing(model(tmp_path), load=load) as manager:
        answer = load.hold(f"infer {name}/1")
        running = asyncio.create_task(ask(manager.registry.servable("m")))
        await until(lambda: manager.registry.servable("m").leases == 1)
        gate = load.hold(f"load {name}/2")
        put(tmp_path / "2")
        await look_twice(manager)
        await until(lambda: f"{name}/2" in load.begun)
        assert states(manager, "m") == {2: "LOADING", 1: "READY"}
        assert manager.registry.servable("m").version == 1
        gate.set()
        await until(lambda: manager.registry.servable("m").version == 2)
        # It takes no call any more, and the one that runs is not disturbed.
        assert states(manager, "m") == {2: "READY", 1: "UNLOADING"}
        with pytest.raises(Unavailable, match="version 1 is not at ready state"):
            manager.registry.servable("m", "1")
        assert [version.files.version for version in manager.registry.versions()] == [1, 2]
        assert not load.closed
        answer.set()
        assert await running == 1
        await until(lambda: states(manager, "m") == {2: "READY", 1: "UNAVAILABLE"})
        assert load.closed == {f"{name}/1": 1}
        assert [version.files.version for version in manager.registry.versions()] == [2]
        assert manager.registry.statuses("m")[1].reason == "unloaded"
        assert manager.registry.statuses("m")[1].error is None
        assert manager.registry.statuses("m")[1].servable is None


async def test_a_new_version_that_fails_leaves_the_old_one(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "1")
    put(tmp_path / "2" / "unfinished")
    async with managing(model(tmp_path), load=load) as manager:
        put(tmp_path / "2", "no disk")
        for _ in range(3):
            await look_twice(manager)
            await until(lambda: states(manager, "m") == {2: "no disk", 1: "READY"})
            assert await ask(manager.registry.servable("m")) == 1
            assert manager.registry.all_ready(), "what comes later does not take readiness away"
        # It is tried again when its files have changed, and not before.
        assert load.begun.count(f"{tmp_path.name}/2") == 1
        put(tmp_path / "2")
        await look_twice(manager)
        await until(lambda: states(manager, "m") == {2: "READY", 1: "UNAVAILABLE"})


async def test_a_version_that_failed_at_the_start_is_not_ready_until_it_is_mended(
    tmp_path: Path, load: Loads
) -> None:
    put(tmp_path / "1")
    put(tmp_path / "2", "no disk")
    async with managing(model(tmp_path, ALL), load=load) as manager:
        assert not manager.registry.all_ready()
        await look_twice(manager)
        assert not manager.registry.all_ready()
        put(tmp_path / "2")
        await look_twice(manager)
        await until(manager.registry.all_ready)


async def test_versions_whose_folders_are_deleted(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "1")
    put(tmp_path / "2")
    async with managing(model(tmp_path, ALL), load=load) as manager:
        shutil.rmtree(tmp_path / "2")
        await manager.refresh()
        assert await ask(manager.registry.servable("m")) == 1
        await until(lambda: states(manager, "m") == {2: "UNAVAILABLE", 1: "READY"})
        shutil.rmtree(tmp_path / "1")
        await manager.refresh()
        with pytest.raises(ModelNotFound, match="'m' has no available versions"):
            manager.registry.servable("m")
        await until(lambda: states(manager, "m") == {2: "UNAVAILABLE", 1: "UNAVAILABLE"})
        assert manager.registry.names() == ["m"]
        put(tmp_path / "1")
        await look_twice(manager)
        await until(lambda: states(manager, "m") == {2: "UNAVAILABLE", 1: "READY"})


@pytest.mark.parametrize("at_a_path", [True, False])
async def test_files_that_change_in_place(tmp_path: Path, load: Loads, *, at_a_path: bool) -> None:
    """At a path they are loaded again; TensorFlow Serving's versions never change."""
    put(tmp_path / "m" / "1")
    root = tmp_path / "m" if at_a_path else model(tmp_path / "m")
    async with managing(root, load=load) as manager:
        served = manager.registry.servable("m")
        put(tmp_path / "m" / "1", "no disk")
        await look_twice(manager)
        await manager.reconciler.wait_for(["m"])
        assert manager.registry.servable("m") is served
        assert manager.registry.version("m", "1").reason == ("no disk" if at_a_path else "")
        (tmp_path / "m" / "1" / "model.py").write_text("")
        await look_twice(manager)
        await manager.reconciler.wait_for(["m"])
        assert (manager.registry.servable("m") is served) is not at_a_path
        assert manager.registry.version("m", "1").reason == ""
        assert load.begun == ["m/1"] * (3 if at_a_path else 1)


async def test_versions_of_a_repository(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(tmp_path, load=load) as manager:
        put(tmp_path / "a" / "2")
        shutil.rmtree(tmp_path / "b")
        put(tmp_path / "c" / "1")
        await look_twice(manager)
        await until(
            lambda: (
                "c" in manager.registry.names()
                and manager.registry.is_ready("c")
                and manager.registry.is_ready("a", "2")
            )
        )
        assert manager.registry.names() == ["a", "c"]
        assert manager.registry.ready_versions("a") == [1, 2]


async def test_a_broken_model_does_not_keep_the_others_from_changing(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    models = [ModelSettings(name, tmp_path / name) for name in ("a", "b")]
    async with managing(*models, load=load) as manager:
        put(tmp_path / "a" / "2", "no disk")
        put(tmp_path / "b" / "2")
        await look_twice(manager)
        await until(lambda: states(manager, "b").get(2) == "READY")
        (tmp_path / "a").rename(tmp_path / "gone")
        put(tmp_path / "b" / "3")
        await look_twice(manager)
        await until(lambda: states(manager, "b").get(3) == "READY")
        assert await ask(manager.registry.servable("a")) == 1


async def test_what_is_wanted_changes_while_a_version_loads(tmp_path: Path, load: Loads) -> None:
    """No look waits for a load, and an unwanted version is removed once it is loaded."""
    put(tmp_path / "1")
    async with managing(model(tmp_path), load=load) as manager:
        gate = load.hold(f"load {tmp_path.name}/2")
        put(tmp_path / "2")
        await look_twice(manager)
        await until(lambda: f"{tmp_path.name}/2" in load.begun)
        put(tmp_path / "3")
        await look_twice(manager)
        assert states(manager, "m") == {3: "START", 2: "LOADING", 1: "READY"}
        gate.set()
        await until(lambda: states(manager, "m") == {3: "READY", 2: "UNAVAILABLE", 1: "UNAVAILABLE"})
        assert load.closed == {f"{tmp_path.name}/{version}": 1 for version in (1, 2)}


async def test_ended_versions_are_forgotten_in_the_end(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "1")
    async with managing(model(tmp_path), load=load) as manager:
        for version in range(1, ENDED_KEPT + 4):
            (tmp_path / str(version)).rename(tmp_path / str(version + 1))
            await manager.reload([model(tmp_path)])
            await until(lambda: set(states(manager, "m").values()) <= {"READY", "UNAVAILABLE"})
        await manager.refresh()
        assert list(states(manager, "m")) == list(range(ENDED_KEPT + 4, 3, -1))


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)])
async def test_whatever_a_load_raises_is_an_error_of_that_model(tmp_path: Path, error: BaseException) -> None:
    def load(backend: str, file: Path, config: ModelConfig) -> Model:
        raise error

    put(tmp_path / "1")
    manager = Manager([model(tmp_path)], load, max_queue_size=1)
    (failed,) = await manager.load_all()
    assert str(failed) == f"{tmp_path / '1' / 'model.py'}: {type(error).__name__}: {error}"
    await manager.close()


# --- the end ---


async def test_calls_that_do_not_end_are_not_waited_for_for_ever(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    put(tmp_path / "1")
    async with managing(model(tmp_path), load=load, drain_seconds=0.01) as manager:
        old = manager.registry.servable("m")
        with old:
            put(tmp_path / "2")
            await manager.reload([model(tmp_path)])
            await until(lambda: states(manager, "m") == {2: "READY", 1: "UNAVAILABLE"})
            assert load.closed == {f"{tmp_path.name}/1": 1}
            assert "m version 1: 1 requests are still in flight after draining for 0 s" in caplog.messages
            with pytest.raises(Unavailable, match="the model was unloaded"):
                await ask(old)


async def test_closing_does_not_wait_for_calls_nor_for_loads(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    manager = Manager([ModelSettings("a", tmp_path / "a")], load, max_queue_size=1)
    await manager.load_all()
    gate = load.hold("load b/1")
    with manager.registry.servable("a"):
        reload = asyncio.create_task(manager.reload([ModelSettings("b", tmp_path / "b")]))
        await until(lambda: "b/1" in load.begun)
        await manager.close()
        assert load.closed == {"a/1": 1}
        with pytest.raises(Unavailable, match="shutting down"):
            await reload
    # What has loaded in vain is closed, too.
    gate.set()
    await until(lambda: load.closed == {"a/1": 1, "b/1": 1})


async def test_a_closed_manager_loads_nothing_more(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "1")
    async with managing(model(tmp_path), load=load) as manager:
        await manager.close()
        with pytest.raises(Unavailable, match="shutting down"):
            await manager.reload([ModelSettings("other", tmp_path)])
        assert len(load.begun) == 1
