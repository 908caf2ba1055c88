"""A real reconciler that wants what the test says, of files on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.repository.scripted_loads import Loads
from triglot import Model
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.manager.registry import Registry
from triglot.repository.scan.source import ModelFiles

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


async def load_no_parts(_: str, __: Collection[str]) -> None:
    """For tests that load no models along with ensembles."""


@asynccontextmanager
async def reconciling(load: Callable[..., Model], **options: Any) -> AsyncIterator[Reconciler]:
    defaults = {
        "warm": None,
        "max_queue_size": 10,
        "skip_missing_dependencies": False,
        "load_timeout": 0.0,
        "drain_seconds": LONG,
        "load_lock_timeout": LONG,
    }
    rules = {"labels_before_load": False, "may_be_empty": True}
    registry = Registry(**{name: options.pop(name, value) for name, value in rules.items()})
    reconciler = Reconciler(registry, load, load_parts=load_no_parts, **defaults | options)
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
    return next(
        (status.state, status.reason)
        for status in reconciler.registry.statuses(model)
        if status.files.version == version
    )
