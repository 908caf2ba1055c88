"""A real reconciler of one model whose loads end, and whose versions drain, when the test says so."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.repository.plan_model import NAME, PlanModel, files_of_all
from tests.repository.reconciling import load_no_parts
from tests.repository.scripted_loads import SECONDS
from tests.waiting import until
from triglot import Model, ModelLoadError, TensorSpec
from triglot.model.config import ModelConfig
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.manager.registry import Registry
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable


class Closing(Model):
    """Says when it is closed."""

    inputs = [TensorSpec("x", "INT32", [1])]
    outputs = [TensorSpec("y", "INT32", [1])]

    def __init__(self, closed: Callable[[], object]) -> None:
        self._closed = closed

    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"]}

    def close(self) -> None:
        self._closed()


class Counting(Reconciler):
    """Tells how many loads have come to their end here, too; not each of them changes what is known."""

    unload_count = 0

    async def _load(self, files: ModelFiles, pass_on: Callable[[], None]) -> None:
        try:
            await super()._load(files, pass_on)
        finally:
            self.unload_count += 1


class Gated:
    """A reconciler, and every version that it ever loaded, in that order.

    A load ends with the next of `outcomes`, well or not. Every version is held by a call until it is let go.
    """

    def __init__(self) -> None:
        self.reconciler = Counting(
            Registry(labels_before_load=False, may_be_empty=True),
            self._load,
            self._hold,
            load_no_parts,
            max_queue_size=10,
            skip_missing_dependencies=False,
            load_timeout=0,
            drain_seconds=3600,
            load_lock_timeout=3600,
        )
        self.reconciler.registry.changes.subscribe(lambda _: self._check())
        self.outcomes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.begun: list[Path] = []
        self.servables: list[Servable] = []
        self.held: set[int] = set()
        self.closed: list[Model] = []
        self.problems: list[str] = []
        self._wanted: dict[int, ModelFiles] = {}
        self._most_wanted = 0
        self._served = False
        self._in_memory = 0
        self._lock = threading.Lock()

    # --- what it is made of ---

    def _load(self, backend: str, file: Path, config: ModelConfig) -> Model:
        with self._lock:
            self.begun.append(file)
            self._in_memory += 1
            if self._in_memory > self._most_wanted + 1:
                self.problems.append(f"{self._in_memory} in memory when {file} is loaded")
        if not self.outcomes.get(timeout=SECONDS):
            with self._lock:
                self._in_memory -= 1
            raise ModelLoadError("no disk")
        model = Closing(lambda: self._close(model))
        return model

    def _close(self, model: Model) -> None:
        with self._lock:
            self._in_memory -= 1
            self.closed.append(model)

    async def _hold(self, servable: Servable, _: ModelFiles) -> None:
        self.held.add(len(self.servables))
        self.servables.append(servable)
        servable.__enter__()

    def _check(self) -> None:
        """At each change: something serves as long as anything is wanted."""
        serves = any(version.ready for version in self.reconciler.registry.versions())
        if self._served and self._wanted and not serves:
            self.problems.append("nothing serves any more")
        self._served = serves

    # --- what happens ---

    def want(self, wanted: Mapping[int, int]) -> None:
        self._wanted = files_of_all(wanted)
        self._most_wanted = max(self._most_wanted, len(wanted))
        self.reconciler.want({NAME: self._wanted})

    def retry(self) -> None:
        self.reconciler.retry(NAME)
        self.reconciler.want({NAME: self._wanted})

    def release(self, number: int) -> None:
        """End the call that holds a version."""
        if number in self.held:
            self.held.discard(number)
            self.servables[number].__exit__()

    def ready(self) -> dict[int, ModelFiles]:
        """The versions that serve, and what of."""
        return {
            version.files.version: version.files for version in self._statuses() if version.state is State.READY
        }

    def failed(self) -> set[int]:
        return {version.files.version for version in self._statuses() if version.error is not None}

    def _statuses(self) -> list[Any]:
        return self.reconciler.registry.statuses(NAME) if self._wanted or self.begun else []

    # --- what has come of it ---

    def open(self) -> int:
        return len(self.servables) - len(self.closed)

    async def is_as(self, model: PlanModel) -> None:
        """Wait until it has come to where the model is."""
        expected = _summary(model)
        await until(lambda: self._summary() == expected)
        assert not self.problems

    def _summary(self) -> object:
        return (
            {
                status.files.version: (status.state, status.files, status.error is not None)
                for status in self._statuses()
            },
            self.begun,
            self.reconciler.unload_count,
            self.open(),
        )

    async def close(self) -> None:
        self.outcomes.put(False)
        await self.reconciler.close()
        await until(lambda: self._in_memory == 0)
        assert len(set(map(id, self.closed))) == len(self.closed) == len(self.servables)


def _summary(model: PlanModel) -> object:
    return (
        {
            number: (version.state, version.files, version.error is not None)
            for number, version in model.known.items()
        },
        [files.file for files in model.begun],
        len(model.begun) - model.is_loading(),
        len(model.serving) + len(model.draining),
    )
