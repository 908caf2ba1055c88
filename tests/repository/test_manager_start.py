"""What a manager makes of models at its paths that it cannot understand or that are not there."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.repository.scripted_loads import Loads, ask, look_twice, managing, put, states
from tests.waiting import until
from triglot.core.errors import Code, Internal, ModelLoadError, ModelNotFound, Unavailable
from triglot.repository.manager.manager import Manager


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


def logged(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """Texts logged at this level."""
    return [record.getMessage() for record in caplog.records if record.levelname == level]


@pytest.mark.parametrize("explicit", [None, ["*"]])
async def test_wrong_configuration_is_reported_before_any_load(
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


async def test_wrong_configuration_next_to_serving_models(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    text = break_config(tmp_path / "b")
    manager = manager_of(tmp_path, load=load)
    assert [str(error) for error in await manager.load_all(all_or_nothing=False)] == [text]
    assert await ask(manager.registry.servable("a")) == 1
    assert not manager.registry.all_ready()
    assert sorted(manager.registry.names()) == ["a", "b"]
    assert not manager.registry.is_ready("b")
    with pytest.raises(ModelNotFound, match="'b' has no available versions"):
        manager.registry.servable("b")
    await manager.refresh()
    assert not manager.registry.all_ready(), "looking again makes it no better"
    (tmp_path / "b" / "config.pbtxt").unlink()
    await manager.refresh()
    await manager.refresh()
    await until(lambda: states(manager, "b") == {1: "READY"})
    assert await ask(manager.registry.servable("b")) == 1
    assert manager.registry.all_ready()
    shutil.rmtree(tmp_path / "b")
    await manager.refresh()
    assert manager.registry.names() == ["a"]
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
        assert manager.registry.names() == ["a"]
        assert manager.registry.all_ready()
        await manager.close()


async def test_a_folder_whose_name_is_no_models(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "lost+found" / "1")
    async with managing(tmp_path, load=load) as manager:
        assert manager.registry.names() == ["a"]
        assert manager.registry.all_ready(), "what has no name cannot be waited for"
        await look_twice(manager)
    text = (
        f"{tmp_path / 'lost+found'} is skipped: 'lost+found' is not a valid model name; expected 1 to 128 letters"
    )
    assert [message.startswith(text) for message in logged(caplog, "WARNING")] == [True]


async def test_every_error_is_reported_once(tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture) -> None:
    """All but what is raised is in the log."""
    for name in ("a", "b", "c"):
        put(tmp_path / name / "1")
    texts = [break_config(tmp_path / name) for name in ("b", "c")]
    manager = manager_of(tmp_path, load=load)
    with pytest.raises(ModelLoadError) as caught:
        await manager.load_all()
    assert [str(caught.value), *logged(caplog, "ERROR")] == texts
    caplog.clear()
    manager = manager_of(tmp_path, load=load)
    assert [str(error) for error in await manager.load_all(all_or_nothing=False)] == texts
    await look_twice(manager)
    assert logged(caplog, "ERROR") == texts
    await manager.close()


async def test_what_is_wrong_with_a_folder_is_readable_until_it_is_repaired(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        put(tmp_path / name / "1")
    never = break_config(tmp_path / "b")
    manager = manager_of(tmp_path, load=load)
    await manager.load_all(all_or_nothing=False)
    served = manager.registry.version("a", "1")
    assert ({name: error.message for name, error in manager.broken().items()}, served.reason) == ({"b": never}, "")
    why = break_config(tmp_path / "a")
    await manager.refresh()
    assert (served.reason, served.failure and served.failure.code) == (why, Code.INVALID_ARGUMENT)
    assert served.ready
    assert logged(caplog, "ERROR") == [never], "it may still be written"
    await manager.refresh()
    assert logged(caplog, "ERROR") == [never, why]
    for name in ("a", "b"):
        (tmp_path / name / "config.pbtxt").unlink()
    await look_twice(manager)
    await until(lambda: states(manager, "b") == {1: "READY"})
    assert (manager.broken(), served.reason, manager.registry.version("b", "1").reason) == ({}, "", "")
    await manager.close()


@pytest.mark.parametrize("all_or_nothing", [True, False])
async def test_policy_without_an_existing_version(
    tmp_path: Path, load: Loads, all_or_nothing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for version in ("1", "2"):
        put(tmp_path / "m" / version)
    put(tmp_path / "ok" / "1")
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text("version_policy { specific { versions: 7 } }")
    text = f"{config}: version_policy.specific: expected one of the versions 1, 2 in {config.parent}, got 7"
    manager = manager_of(tmp_path, load=load)
    if all_or_nothing:
        with pytest.raises(ModelLoadError, match=re.escape(text)):
            await manager.load_all()
        assert load.begun == []
        return
    assert [str(error) for error in await manager.load_all(all_or_nothing=False)] == [text]
    assert states(manager, "ok") == {1: "READY"}
    assert not manager.registry.all_ready()
    config.write_text("version_policy { all {} }")
    await look_twice(manager)
    await until(lambda: states(manager, "m") == {2: "READY", 1: "READY"})
    config.write_text("version_policy { specific { versions: 7 } }")
    for _ in range(3):
        await manager.refresh()
        assert states(manager, "m") == {2: "READY", 1: "READY"}
    assert logged(caplog, "ERROR") == [text, text]
    # The version that is wanted comes: until it is whole, what served goes on.
    put(tmp_path / "m" / "7")
    for _ in range(2):
        await manager.refresh()
        assert states(manager, "m")[1] == "READY"
    await until(lambda: states(manager, "m") == {7: "READY", 2: "UNAVAILABLE", 1: "UNAVAILABLE"})
    await manager.close()


async def test_a_model_whose_policy_wants_nothing_cannot_be_loaded_by_request(
    tmp_path: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    """What is odd about other models is no concern of a request for this one."""
    put(tmp_path / "m" / "1")
    (tmp_path / "m" / "2").mkdir()
    put(tmp_path / "other" / "1")
    break_config(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    config = tmp_path / "m" / "config.pbtxt"
    async with managing(tmp_path, load=load, explicit=()) as manager:
        assert caplog.messages == []
        await manager.load_model("m")
        config.write_text("version_policy { specific { versions: [7, 8] } }")
        text = f"{config}: version_policy.specific: expected one of the versions 1 in {config.parent}, got 7, 8"
        for _ in range(2):
            with pytest.raises(Internal, match=re.escape(text)):
                await manager.load_model("m")
        assert states(manager, "m") == {1: "READY"}
        assert manager.registry.version("m", "1").reason == text
        assert logged(caplog, "ERROR") == [text]
        manager.unload_model("m")
        await until(lambda: manager.registry.version("m", "1").reason == "unloaded")
        config.unlink()
        await manager.load_model("m")
        assert manager.registry.version("m", "1").reason == ""
    (warning,) = logged(caplog, "WARNING")
    assert warning.startswith(
        f"{tmp_path / 'm' / '2'} is skipped: it contains no model, expected {{MLmodel, predictor.toml, "
    )


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
        if all_or_nothing:
            with pytest.raises(ModelLoadError, match=text):
                await manager.load_all()
            continue
        (error,) = await manager.load_all(all_or_nothing=False)
        assert text in str(error)
        assert states(manager, "a") == {1: "READY"}
        await manager.close()
    for options in ({"explicit": ()}, {"poll_interval": 3600.0}):
        manager = manager_of(Path("good/../empty"), load=load, **options)
        assert await manager.load_all(all_or_nothing=all_or_nothing) == []
        await manager.close()


async def test_named_models_that_are_missing(tmp_path: Path, load: Loads) -> None:
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
    assert manager.registry.served() == ["a"]
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
    assert not manager.registry.all_ready()
    manager.unload_model("bad")
    assert manager.registry.all_ready()
    assert manager.registry.served() == ["a"]
    manager.unload_model("a")
    await manager.load_model("b")
    assert manager.registry.all_ready()
    assert manager.registry.served() == ["b"]
    await manager.close()
