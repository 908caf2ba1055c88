"""The whole list of models replaced at run time: what is checked, what is waited for, what stays as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.repository.scripted_loads import Loads, ask, managing, put, reload_error, settings, states
from tests.waiting import until
from triglot.core.errors import Code, FailedPrecondition, InvalidArgument, ModelNotFound, Unavailable
from triglot.model.config import ALL, VersionPolicy
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.manager import Manager
from triglot.repository.scan.layout import BACKEND_OF_FILE


@pytest.fixture
def load() -> Loads:
    return Loads()


# --- what is served ---


async def test_models_come_and_go(tmp_path: Path, load: Loads) -> None:
    for model in ("a", "b", "c"):
        put(tmp_path / model / "1")
    async with managing(settings(tmp_path / "a"), settings(tmp_path / "b"), load=load) as manager:
        await manager.reload([settings(tmp_path / "b"), settings(tmp_path / "c")])
        assert manager.registry.names() == ["b", "c"]
        assert [await ask(manager.registry.servable(name)) for name in ("b", "c")] == [1, 1]
        for version in ("", "1"):
            with pytest.raises(ModelNotFound, match="'a' is not found"):
                manager.registry.servable("a", version)
        await until(lambda: load.closed["a/1"] == 1)
        await until(lambda: states(manager, "a") == {1: "UNAVAILABLE"})
        assert load.begun == ["a/1", "b/1", "c/1"]


async def test_an_empty_list_unloads_all(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(settings(tmp_path / "a"), settings(tmp_path / "b"), load=load) as manager:
        assert manager.registry.all_ready()
        await manager.reload([])
        assert not manager.registry.names()
        assert not list(manager.registry.versions())
        assert not manager.registry.all_ready()
        await until(lambda: load.closed == {"a/1": 1, "b/1": 1})
        await manager.reload([settings(tmp_path / "a")])
        assert await ask(manager.registry.servable("a")) == 1
        assert manager.registry.all_ready()


async def test_model_is_added_again_while_it_is_unloaded(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with managing(settings(tmp_path / "a"), load=load) as manager:
        with manager.registry.servable("a") as held:
            await manager.reload([])
            assert states(manager, "a") == {1: "UNLOADING"}
            await manager.reload([settings(tmp_path / "a")])
            assert await ask(manager.registry.servable("a")) == await ask(held) == 1
            assert load.closed["a/1"] == 0
        await until(lambda: load.closed["a/1"] == 1)
        assert states(manager, "a") == {1: "READY"}
        assert await ask(manager.registry.servable("a")) == 1


async def test_the_policy_of_a_model_that_stays(tmp_path: Path, load: Loads) -> None:
    for version in ("1", "2", "3"):
        put(tmp_path / "a" / version)
    async with managing(settings(tmp_path / "a"), load=load) as manager:
        assert states(manager, "a") == {3: "READY"}
        await manager.reload([settings(tmp_path / "a", VersionPolicy(specific=frozenset({1})))])
        await until(lambda: states(manager, "a") == {3: "UNAVAILABLE", 1: "READY"})
        await manager.reload([settings(tmp_path / "a", ALL)])
        await until(lambda: states(manager, "a") == {3: "READY", 2: "READY", 1: "READY"})
        assert await ask(manager.registry.servable("a")) == 3


@pytest.mark.parametrize("poll_interval", [0.0, 3600.0])
async def test_new_versions_of_a_model_that_stays(tmp_path: Path, load: Loads, poll_interval: float) -> None:
    """They are taken up now, unless there are looks for that: they may still be written."""
    put(tmp_path / "a" / "1")
    async with managing(settings(tmp_path / "a", ALL), load=load, poll_interval=poll_interval) as manager:
        put(tmp_path / "a" / "2")
        for _ in range(3):
            await manager.reload([settings(tmp_path / "a", ALL, stable=1)])
        if poll_interval:
            assert states(manager, "a") == {1: "READY"}
            # Wanted in another way: somebody means the folder as it is now.
            await manager.reload([settings(tmp_path / "a", VersionPolicy(latest=2))])
        await until(lambda: states(manager, "a").get(2) == "READY")


async def test_a_base_path_that_moves(tmp_path: Path, load: Loads) -> None:
    """The same version from elsewhere takes the place of the old one in one step."""
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    put(tmp_path / "bad" / "1", "no disk")
    async with managing(ModelSettings("m", tmp_path / "a"), load=load) as manager:
        gate = load.hold("load b/1")
        await manager.reload([ModelSettings("m", tmp_path / "b")])
        await until(lambda: load.begun == ["a/1", "b/1"])
        old = manager.registry.servable("m")
        assert states(manager, "m") == {1: "READY"}
        gate.set()
        await until(lambda: manager.registry.servable("m") is not old)
        await until(lambda: load.closed == {"a/1": 1})
        serving = manager.registry.servable("m", "1")
        await manager.reload([ModelSettings("m", tmp_path / "bad")])
        await until(lambda: str(manager.registry.version("m", "1").error) == "no disk")
        assert manager.registry.servable("m") is serving
        assert states(manager, "m") == {1: "READY"}


async def test_a_base_path_that_is_wrong_keeps_a_model_that_stays(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with managing(settings(tmp_path / "a"), load=load) as manager:
        await manager.reload([ModelSettings("a", tmp_path / "gone")])
        assert await ask(manager.registry.servable("a")) == 1


# --- what is waited for ---


async def test_it_returns_when_what_is_new_serves(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(settings(tmp_path / "a"), load=load) as manager:
        put(tmp_path / "a" / "2")
        gate = load.hold("load b/1")
        reload = asyncio.create_task(manager.reload([settings(tmp_path / "a"), settings(tmp_path / "b")]))
        await until(lambda: "b/1" in load.begun)
        assert not reload.done()
        assert states(manager, "b") == {1: "LOADING"}
        with pytest.raises(ModelNotFound, match="'b' has no available versions"):
            manager.registry.servable("b")
        with pytest.raises(Unavailable, match="'b' version 1 is not at ready state"):
            manager.registry.servable("b", "1")
        assert await ask(manager.registry.servable("a")) in (1, 2)
        assert manager.registry.all_ready(), "a model that comes does not take readiness away"
        gate.set()
        await reload
        assert await ask(manager.registry.servable("b")) == 1


async def test_a_model_whose_turn_to_load_has_not_come(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(load=load) as manager:
        gate = load.hold("load a/1")
        reload = asyncio.create_task(manager.reload([settings(tmp_path / "a"), settings(tmp_path / "b")]))
        await until(lambda: load.begun == ["a/1"])
        assert states(manager, "b") == {1: "START"}
        assert [version.state.value for version in manager.registry.versions()] == ["LOADING", "UNKNOWN"]
        # What does not have to wait for a turn does not.
        gate.set()
        await reload
        assert load.begun == ["a/1", "b/1"]


async def test_a_model_that_is_not_wanted_any_more_when_its_turn_comes(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(load=load) as manager:
        gate = load.hold("load a/1")
        reload = asyncio.create_task(manager.reload([settings(tmp_path / "a"), settings(tmp_path / "b")]))
        await until(lambda: load.begun == ["a/1"])
        reload.cancel()
        await asyncio.wait([reload])
        without = asyncio.create_task(manager.reload([settings(tmp_path / "a")]))
        await until(lambda: states(manager, "b") == {1: "UNAVAILABLE"})
        gate.set()
        await without
        await manager.reload([settings(tmp_path / "a")])
        assert load.begun == ["a/1"]


async def test_it_does_not_wait_for_a_model_that_stays(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with managing(settings(tmp_path / "a"), load=load) as manager:
        put(tmp_path / "a" / "2")
        gate = load.hold("load a/2")
        await manager.reload([settings(tmp_path / "a")])
        assert await ask(manager.registry.servable("a")) == 1
        gate.set()
        await until(lambda: states(manager, "a") == {2: "READY", 1: "UNAVAILABLE"})


async def test_two_reloads_come_one_after_the_other(tmp_path: Path, load: Loads) -> None:
    for model in ("a", "b"):
        put(tmp_path / model / "1")
    async with managing(load=load) as manager:
        gate = load.hold("load a/1")
        first = asyncio.create_task(manager.reload([settings(tmp_path / "a")]))
        await until(lambda: load.begun == ["a/1"])
        second = asyncio.create_task(manager.reload([settings(tmp_path / "b")]))
        await asyncio.sleep(0)
        assert manager.registry.names() == ["a"]
        gate.set()
        await first
        await second
        assert manager.registry.names() == ["b"]


@asynccontextmanager
async def left(folder: Path, load: Loads) -> AsyncIterator[tuple[Manager, threading.Event]]:
    """The request for the model "a" is cancelled while it is loaded; and what lets the load end."""
    put(folder / "a" / "1")
    async with managing(load=load) as manager:
        gate = load.hold("load a/1")
        reload = asyncio.create_task(manager.reload([settings(folder / "a")]))
        await until(lambda: load.begun == ["a/1"])
        reload.cancel()
        await asyncio.wait([reload])
        yield manager, gate


async def test_a_caller_that_leaves_does_not_stop_the_loading(tmp_path: Path, load: Loads) -> None:
    async with left(tmp_path, load) as (manager, gate):
        gate.set()
        await until(lambda: states(manager, "a") == {1: "READY"})
        await manager.reload([settings(tmp_path / "a")])


async def test_a_model_that_is_not_wanted_any_more_when_it_has_loaded(tmp_path: Path, load: Loads) -> None:
    async with left(tmp_path, load) as (manager, gate):
        await manager.reload([])
        gate.set()
        await until(lambda: load.closed["a/1"] == 1)
        await until(lambda: states(manager, "a") == {1: "UNAVAILABLE"})


# --- models that fail ---


async def test_models_that_do_not_become_available(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "good" / "1")
    put(tmp_path / "bad" / "3", "no disk")
    (tmp_path / "empty").mkdir()
    async with managing(load=load) as manager:
        models = [settings(tmp_path / name) for name in ("bad", "good", "empty", "gone")]
        error = await reload_error(manager, *models)
        assert error.code is Code.UNKNOWN
        assert error.message == (
            "3 model(s) did not become available: {{{name: bad version: 3} due to error: UNKNOWN: no disk}, "
            "{{name: empty} due to error: NOT_FOUND: No versions of servable empty found under base path "
            f"{tmp_path / 'empty'}, expected VERSION/{{{', '.join(BACKEND_OF_FILE)}}}}}, "
            f"{{{{name: gone}} due to error: NOT_FOUND: Could not find base path {tmp_path / 'gone'} for servable "
            "gone}, }"
        )
        # The list has been replaced; the models that could be loaded serve.
        assert manager.registry.names() == ["bad", "good", "empty", "gone"]
        assert await ask(manager.registry.servable("good")) == 1
        assert states(manager, "bad") == {3: "no disk"}
        for name in ("empty", "gone"):
            with pytest.raises(ModelNotFound, match="has no available versions"):
                manager.registry.servable(name)
            with pytest.raises(ModelNotFound, match="is not found"):
                manager.registry.statuses(name)


async def test_one_version_that_serves_is_enough(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "a" / "2", "no disk")
    async with managing(load=load) as manager:
        await manager.reload([settings(tmp_path / "a", ALL)])
        assert states(manager, "a") == {2: "no disk", 1: "READY"}


async def test_what_failed_is_tried_again_when_its_files_have_changed(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", "no disk")
    async with managing(load=load) as manager:
        await reload_error(manager, settings(tmp_path / "a"))
        # A file of settings may be applied every second.
        await manager.reload([settings(tmp_path / "a")])
        assert load.begun == ["a/1"]
        put(tmp_path / "a" / "1", "no memory either")
        assert "no memory either" in (await reload_error(manager, settings(tmp_path / "a"))).message
        put(tmp_path / "a" / "1")
        await manager.reload([settings(tmp_path / "a")])
        assert await ask(manager.registry.servable("a")) == 1
        assert manager.registry.version("a", "1").error is None


async def test_what_failed_is_tried_again_when_it_comes_back(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", "no disk")
    async with managing(load=load) as manager:
        await reload_error(manager, settings(tmp_path / "a"))
        await manager.reload([])
        assert states(manager, "a") == {1: "no disk"}
        await reload_error(manager, settings(tmp_path / "a"))
        assert load.begun == ["a/1", "a/1"]


@pytest.mark.parametrize("name", ["two words", ""])
async def test_a_wrong_name_changes_nothing(tmp_path: Path, load: Loads, name: str) -> None:
    put(tmp_path / "a" / "1")
    async with managing(settings(tmp_path / "a"), load=load) as manager:
        error = await reload_error(manager, ModelSettings(name, tmp_path / "a"))
        assert isinstance(error, InvalidArgument)
        assert manager.registry.names() == ["a"]
        twice = await reload_error(manager, settings(tmp_path / "a"), settings(tmp_path / "a"))
        assert twice.message == "Illegal to list model a multiple times in config list"


async def test_models_at_paths_cannot_be_replaced(tmp_path: Path, load: Loads) -> None:
    """Any client could have the server load, and so run, what lies elsewhere."""
    put(tmp_path / "m" / "1")
    manager = Manager([tmp_path / "m"], load, max_queue_size=1)
    await manager.load_all()
    with pytest.raises(FailedPrecondition, match="this server's model list cannot be replaced"):
        await manager.reload([ModelSettings("other", tmp_path / "m")])
    assert manager.registry.names() == ["m"]
    await manager.close()
