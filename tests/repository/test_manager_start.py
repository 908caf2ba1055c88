"""What a manager makes of models at its paths that it cannot understand or that are not there."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted_loads import Loads, ask, put, states, until

from triglot.core.errors import ModelLoadError, ModelNotFound, Unavailable
from triglot.repository.manager import Manager


@pytest.fixture
def load() -> Loads:
    return Loads()


def manager_of(*roots: Path, load: Loads, **options: Any) -> Manager:
    return Manager(roots, load, **{"max_queue_size": 100} | options)


def break_config(folder: Path) -> str:
    """What is wrong with the model's configuration from now on."""
    file = folder / "config.pbtxt"
    file.write_text("max_batch_size: -1")
    return f"{file}: max_batch_size: expected at least 0, got -1"


@pytest.mark.parametrize("explicit", [None, ["*"]])
async def test_a_wrong_configuration_is_told_before_anything_is_loaded(
    tmp_path: Path, load: Loads, explicit: list[str] | None
) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    text = break_config(tmp_path / "b")
    manager = manager_of(tmp_path, load=load, explicit=explicit)
    with pytest.raises(ModelLoadError) as caught:
        await manager.load_all()
    assert str(caught.value) == text
    assert load.begun == []
    await manager.close()


async def test_a_wrong_configuration_beside_models_that_serve(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    text = break_config(tmp_path / "b")
    manager = manager_of(tmp_path, load=load)
    assert [str(error) for error in await manager.load_all(all_or_nothing=False)] == [text]
    assert await ask(manager.servable("a")) == 1
    assert not manager.all_ready()
    assert sorted(manager.names()) == ["a", "b"]
    assert not manager.is_ready("b")
    with pytest.raises(ModelNotFound, match="'b' has no available versions"):
        manager.servable("b")
    await manager.refresh()
    assert not manager.all_ready(), "looking again makes it no better"
    (tmp_path / "b" / "config.pbtxt").unlink()
    await manager.refresh()
    await manager.refresh()
    await until(lambda: states(manager, "b") == {1: "READY"})
    assert await ask(manager.servable("b")) == 1
    assert manager.all_ready()
    shutil.rmtree(tmp_path / "b")
    await manager.refresh()
    assert manager.names() == ["a"]
    await manager.close()


async def test_a_configuration_without_a_model(tmp_path: Path, load: Loads) -> None:
    """Where looks are to come, so may the model."""
    put(tmp_path / "a" / "1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.pbtxt").touch()
    manager = manager_of(tmp_path, load=load)
    with pytest.raises(ModelLoadError, match="no version of the model"):
        await manager.load_all()
    for options in ({"poll_interval": 3600.0}, {"explicit": ["*"]}):
        manager = manager_of(tmp_path, load=load, **options)
        assert await manager.load_all() == []
        assert manager.names() == ["a"]
        assert manager.all_ready()
        await manager.close()


async def test_a_folder_whose_name_is_no_models(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "two words" / "1")
    manager = manager_of(tmp_path, load=load)
    (error,) = await manager.load_all(all_or_nothing=False)
    assert "two words" in str(error)
    assert manager.names() == ["a"]
    assert manager.all_ready(), "what has no name cannot be waited for"
    await manager.close()


@pytest.mark.parametrize("all_or_nothing", [True, False])
async def test_a_path_that_is_wrong(
    tmp_path: Path, load: Loads, all_or_nothing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is written."""
    put(tmp_path / "good" / "a" / "1")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for path, text in (("empty", "no models here"), ("good/../empty", "no models here"), ("gone", "no such file")):
        manager = manager_of(Path("good"), Path(path), load=load)
        with pytest.raises(ModelLoadError, match=text):
            await manager.load_all(all_or_nothing=all_or_nothing)
    for options in ({"explicit": ()}, {"poll_interval": 3600.0}):
        manager = manager_of(Path("good/../empty"), load=load, **options)
        assert await manager.load_all(all_or_nothing=all_or_nothing) == []
        await manager.close()


async def test_models_that_are_named_and_not_there(tmp_path: Path, load: Loads) -> None:
    for name in ("a", "b"):
        put(tmp_path / name / "1")
    why = break_config(tmp_path / "b")
    texts = [
        f"failed to load '{name}', failed to poll from model repository: {text}"
        for name, text in (("b", why), ("c", f"no model of this name in {tmp_path}"))
    ]
    manager = manager_of(tmp_path, load=load, explicit=["c", "b", "a"])
    with pytest.raises(ModelLoadError) as caught:
        await manager.load_all()
    assert str(caught.value) == texts[1]
    errors = await manager.load_all(all_or_nothing=False)
    assert sorted(map(str, errors)) == texts
    assert states(manager, "a") == {1: "READY"}
    assert manager.served() == ["a"]
    await manager.close()


async def test_a_manager_that_is_closed_while_a_model_loads(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    manager = manager_of(tmp_path, load=load, explicit=())
    await manager.load_all()
    gate = load.hold("load a/1")
    loading = asyncio.create_task(manager.load_model("a"))
    await until(lambda: load.begun == ["a/1"])
    await manager.close()
    with pytest.raises(Unavailable, match="the server is shutting down"):
        await loading
    gate.set()
    await until(lambda: load.closed == {"a/1": 1})


async def test_a_model_that_was_loaded_at_the_start_may_be_unloaded(tmp_path: Path, load: Loads) -> None:
    for name in ("a", "b"):
        put(tmp_path / name / "1")
    put(tmp_path / "bad" / "1", "no disk")
    manager = manager_of(tmp_path, load=load, explicit=["bad", "a"])
    assert [str(error) for error in await manager.load_all()] == ["no disk"]
    assert not manager.all_ready()
    manager.unload_model("bad")
    assert manager.all_ready()
    assert manager.served() == ["a"]
    manager.unload_model("a")
    await manager.load_model("b")
    assert manager.all_ready()
    assert manager.served() == ["b"]
    await manager.close()
