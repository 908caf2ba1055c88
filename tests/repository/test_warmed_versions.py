"""A version takes no calls before its warm-up has ended well."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.repository.scripted_loads import Loads, ask, look_twice, managing, put, states
from tests.waiting import until
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable


@pytest.fixture
def load() -> Loads:
    return Loads()


async def test_a_version_is_warm_before_it_takes_calls(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "1")
    warmed: list[tuple[int, Path]] = []
    begun, go = asyncio.Event(), asyncio.Event()
    go.set()

    async def warm(servable: Servable, files: ModelFiles) -> None:
        assert servable.version == await ask(servable)
        begun.set()
        await go.wait()
        warmed.append((files.version, files.file.parent))

    async with managing(ModelSettings("m", tmp_path), load=load, warm=warm) as manager:
        assert warmed == [(1, tmp_path / "1")]
        go.clear()
        begun.clear()
        put(tmp_path / "2")
        await look_twice(manager)
        await begun.wait()
        assert states(manager, "m") == {2: "LOADING", 1: "READY"}
        assert await ask(manager.registry.servable("m")) == 1
        go.set()
        await until(lambda: manager.registry.servable("m").version == 2)
        assert warmed == [(1, tmp_path / "1"), (2, tmp_path / "2")]


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (InvalidArgument("Input is empty."), "Input is empty."),
        (ModelLoadError("not in TFRecord format"), "not in TFRecord format"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
async def test_a_warm_up_that_fails(tmp_path: Path, load: Loads, raised: Exception, text: str) -> None:
    async def warm(servable: Servable, files: ModelFiles) -> None:
        if files.version == 2:
            raise raised

    put(tmp_path / "1")
    async with managing(ModelSettings("m", tmp_path), load=load, warm=warm) as manager:
        put(tmp_path / "2")
        await look_twice(manager)
        await until(lambda: states(manager, "m") == {2: text, 1: "READY"})
        assert await ask(manager.registry.servable("m")) == 1
        assert load.closed == {f"{tmp_path.name}/2": 1}
