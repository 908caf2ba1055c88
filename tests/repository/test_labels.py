"""Labels of versions: they move as one, and name what serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.scripted_loads import Loads, ask, look_twice, managing, put, reload_error, settings, states
from tests.waiting import until
from triglot.core.errors import FailedPrecondition, ModelNotFound
from triglot.model.config import ALL, LATEST
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.registry import UnknownLabel


def label_error(model: str, version: int) -> str:
    return (
        f"Request to assign label to version {version} of model {model}, which is not currently available for "
        "inference"
    )


@pytest.fixture
def load() -> Loads:
    return Loads()


async def test_labels(tmp_path: Path, load: Loads) -> None:
    for version in ("1", "2"):
        put(tmp_path / "a" / version)
    async with managing(settings(tmp_path / "a", ALL, stable=1, old=1), load=load) as manager:
        assert [await ask(manager.registry.servable("a", label=label)) for label in ("stable", "old")] == [1, 1]
        await manager.reload([settings(tmp_path / "a", ALL, stable=2, canary=2)])
        assert [await ask(manager.registry.servable("a", label=label)) for label in ("stable", "canary")] == [2, 2]
        for model, label in (("a", "old"), ("a", "1"), ("unknown", "stable")):
            with pytest.raises(UnknownLabel) as caught:
                manager.registry.servable(model, label=label)
            assert caught.value.message == f"Unrecognized servable version label: {label}"


async def test_a_label_for_a_version_that_is_not_available_changes_nothing(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(settings(tmp_path / "a", stable=1), load=load) as manager:
        # Neither one that is not there, nor one that comes with this very list.
        put(tmp_path / "a" / "2")
        for labels, model in (
            ({"stable": 9}, "a"),
            ({"stable": 1, "canary": 9}, "a"),
            ({"stable": 2}, "a"),
            ({"stable": 1}, "b"),
        ):
            models = [settings(tmp_path / model, LATEST, **labels), ModelSettings("new", tmp_path / "a")]
            error = await reload_error(manager, *models)
            assert isinstance(error, FailedPrecondition)
            assert error.message == label_error(model, max(labels.values()))
            assert manager.registry.names() == ["a"]
            assert manager.registry.labelled("a", "stable") == 1
            assert states(manager, "a") == {1: "READY"}


async def test_new_labels_before_their_version(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put(tmp_path / "b" / "1")
    async with managing(settings(tmp_path / "a", ALL), load=load, labels_before_load=True) as manager:
        await manager.reload([settings(tmp_path / "a", ALL, canary=2), settings(tmp_path / "b", first=1)])
        assert await ask(manager.registry.servable("b", label="first")) == 1
        with pytest.raises(ModelNotFound, match="version 2 is not found"):
            manager.registry.servable("a", label="canary")
        assert manager.registry.labelled("a", "canary") == 2
        # One that stays may go on waiting, one that moves may not.
        await manager.reload([settings(tmp_path / "a", ALL, canary=2)])
        error = await reload_error(manager, settings(tmp_path / "a", ALL, canary=3))
        assert error.message == label_error("a", 3)
        await manager.reload([settings(tmp_path / "a", ALL, canary=1)])
        put(tmp_path / "a" / "2")
        await look_twice(manager)
        await until(lambda: states(manager, "a") == {2: "READY", 1: "READY"})
        await manager.reload([settings(tmp_path / "a", ALL, canary=2)])
        assert await ask(manager.registry.servable("a", label="canary")) == 2


async def test_label_outlasts_its_version(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with managing(settings(tmp_path / "a", stable=1), load=load) as manager:
        put(tmp_path / "a" / "2")
        await look_twice(manager)
        await until(lambda: states(manager, "a") == {2: "READY", 1: "UNAVAILABLE"})
        with pytest.raises(ModelNotFound, match="version 1 is not found"):
            manager.registry.servable("a", label="stable")
        assert manager.registry.labelled("a", "stable") == 1
        assert (await reload_error(manager, settings(tmp_path / "a", stable=1))).message == label_error("a", 1)
