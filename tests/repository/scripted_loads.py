"""Loads that the test drives: real folders on disk, and models whose loading, running and closing it sees."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from triglot import Call, Model, ModelLoadError, ServingError, TensorSpec
from triglot.model.config import LATEST, ModelConfig, VersionPolicy
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.plan import State
from triglot.scheduling.servable import Servable

SECONDS = 20
"""How long anything may take; only a test that fails waits so long."""


class Numbered(Model):
    """Answers its version; fails when it is called after its end."""

    inputs = [TensorSpec("x", "INT32", [1])]
    outputs = [TensorSpec("y", "INT32", [1])]
    instances = 2

    def __init__(self, version: int, gate: threading.Event, closed: Callable[[], object]) -> None:
        self.version = version
        self.gate = gate
        self.closed = closed
        self.is_closed = False

    def answer(self) -> dict[str, Any]:
        assert self.gate.wait(SECONDS)
        assert not self.is_closed, "called after close()"
        return {"y": np.array([self.version], np.int32)}

    def close(self) -> None:
        self.is_closed = True
        self.closed()


class Blocking(Numbered):
    """On threads."""

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.answer()


class OnLoop(Numbered):
    """In several turns of the event loop."""

    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(5):
            await asyncio.sleep(0)
        return self.answer()


class Loads:
    """`load` for a manager, of models of a kind. A version is called as its folders are: "m/1".

    A file's text is the error that loading it ends with. `hold` keeps a version from being loaded, or from
    answering, until its gate is opened.
    """

    def __init__(self, kind: type[Numbered] = Blocking) -> None:
        self._kind = kind
        self.begun: list[str] = []
        self.closed: Counter[str] = Counter()
        self._gates: defaultdict[str, threading.Event] = defaultdict(_open_gate)

    def __call__(self, backend: str, file: Path, config: ModelConfig) -> Model:
        name = f"{file.parent.parent.name}/{file.parent.name}"
        self.begun.append(name)
        assert self._gates[f"load {name}"].wait(SECONDS)
        if text := file.read_text():
            raise ModelLoadError(text)
        return self._kind(int(file.parent.name), self._gates[f"infer {name}"], lambda: self.closed.update([name]))

    def hold(self, what: str) -> threading.Event:
        """The gate of "load m/1" or "infer m/1", closed."""
        self._gates[what].clear()
        return self._gates[what]

    def open_all(self) -> None:
        """Let everything continue."""
        for gate in self._gates.values():
            gate.set()


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def put(folder: Path, text: str = "") -> None:
    """A version's folder; with a text, it cannot be loaded, and this is why."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(text)


@asynccontextmanager
async def managing(*roots: Any, load: Loads, **options: Any) -> AsyncIterator[Manager]:
    """A manager that has loaded what it could."""
    manager = Manager(roots, load, **{"max_queue_size": 100} | options)
    try:
        await manager.load_all()
        yield manager
    finally:
        load.open_all()
        await manager.close()


def states(manager: Manager, name: str) -> dict[int, str]:
    """The state of every version that ever was, highest first; of one that failed, why."""
    return {
        status.files.version: status.error.message
        if status.error and status.state is State.UNAVAILABLE
        else status.state.name
        for status in manager.registry.statuses(name)
    }


async def ask(servable: Servable) -> int:
    """The version that answers."""
    with servable:
        answer = await direct_infer(servable, {"x": np.array([0], np.int32)}, Call())
        return int(answer["y"][0])


async def look_twice(manager: Manager) -> None:
    """What is new is whole when it is seen twice."""
    await manager.refresh()
    await manager.refresh()


def settings(folder: Path, policy: VersionPolicy = LATEST, **labels: int) -> ModelSettings:
    """A model called as its folder."""
    return ModelSettings(folder.name, folder, policy, labels)


async def reload_error(manager: Manager, *models: ModelSettings) -> ServingError:
    with pytest.raises(ServingError) as caught:
        await manager.reload(models)
    return caught.value
