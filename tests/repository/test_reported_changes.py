"""What is logged of a list of models that is replaced: added and removed models, and why."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.repository.scripted_loads import Loads, managing, put, reload_error, settings


def change_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines since the last time."""
    lines = [f"{record.levelname[0]} {record.getMessage()}" for record in caplog.records]
    caplog.clear()
    return [line.partition(", expected")[0] for line in lines]


async def test_a_list_that_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triglot.repository.manager.manager")
    a, b, c = (tmp_path / name for name in "abc")
    for folder in (a, b, c):
        put(folder / "1")
    async with managing(settings(a), settings(b), load=Loads(), poll_interval=3600.0) as manager:
        assert change_lines(caplog) == ["I models to load: 2"]
        await manager.reload([settings(a), settings(b)])
        assert change_lines(caplog) == []
        await manager.reload([settings(c), settings(a, stable=1)])
        assert change_lines(caplog) == ["I the model list changed: new: c; removed: b; changed: a"]
        await manager.reload([])
        assert change_lines(caplog) == ["I the model list changed: removed: a, c"]


async def test_why_models_do_not_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list that is applied again and again, as `--model_config_file_poll_wait_seconds` does."""
    caplog.set_level(logging.INFO, "triglot.repository.manager.manager")
    for name in ("a", "b"):
        put(tmp_path / name / "1")
    (tmp_path / "empty").mkdir()
    a, b = (settings(tmp_path / name) for name in ("a", "b"))
    async with managing(a, b, load=Loads(), poll_interval=3600.0) as manager:
        assert change_lines(caplog) == ["I models to load: 2"]
        models = [replace(a, base_path=tmp_path / "nowhere"), replace(b, base_path=tmp_path / "empty")]
        for _ in range(3):
            await manager.reload(models)
        missing_path = f"Could not find base path {tmp_path / 'nowhere'} for servable a"
        assert change_lines(caplog) == [
            "I the model list changed: changed: a, b",
            f"E {missing_path}",
            f"W No versions of servable b found under base path {tmp_path / 'empty'}",
        ]
        assert manager.registry.version("a", "1").reason == missing_path
        assert manager.registry.is_ready("a")
        assert not manager.registry.is_ready("b")
        new = settings(tmp_path / "new")
        assert missing_path not in str(await reload_error(manager, *models, new))
        await manager.reload([*models, new])
        why = f"Could not find base path {tmp_path / 'new'} for servable new"
        assert change_lines(caplog) == ["I the model list changed: new: new", f"E {why}"]
        assert manager.broken()["new"].message == why


async def test_a_folder_that_is_emptied_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a scan finds is logged when it is found twice."""
    put(tmp_path / "m" / "1")
    async with managing(settings(tmp_path / "m"), load=Loads()) as manager:
        shutil.rmtree(tmp_path / "m" / "1")
        await manager.refresh()
        assert change_lines(caplog) == []
        for _ in range(3):
            await manager.refresh()
        assert change_lines(caplog) == [f"W No versions of servable m found under base path {tmp_path / 'm'}"]
