"""A reconciler of ensembles and of the models that they are made of, whose loads the test holds and fails."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.repository.scripted_loads import SECONDS
from tests.waiting import until
from triglot import Model, ModelLoadError, Step, TensorSpec, backends
from triglot.core.errors import MissingDependency
from triglot.model.config import ModelConfig, TensorConfig
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.scan.source import ModelFiles


class Named(Model):
    """Takes `x` and gives `y`, of the datatype that the version was loaded with."""

    def __init__(self, datatype: str) -> None:
        self.inputs = [TensorSpec("x", datatype, [-1])]
        self.outputs = [TensorSpec("y", datatype, [-1])]

    async def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": np.array(inputs["x"])}


class GatedLoads:
    """Loads ensembles as usual, and other models when they are let; `begun` are the names, in that order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.failing: dict[str, str] = {}
        self.missing: set[str] = set()
        self.datatypes: dict[str, str] = {}
        self._gates: dict[str, threading.Event] = {}

    def hold(self, *names: str) -> None:
        self._gates |= {name: threading.Event() for name in names}

    def release(self, *names: str) -> None:
        for name in names or tuple(self._gates):
            self._gates[name].set()

    def __call__(self, backend: str, file: Path, config: ModelConfig) -> Model:
        name = file.parent.name
        self.begun.append(name)
        if backend == "ensemble":
            return backends.load(backend, file, config)
        assert name not in self._gates or self._gates[name].wait(SECONDS)
        if name in self.missing:
            raise MissingDependency("a library")
        if name in self.failing:
            raise ModelLoadError(self.failing[name])
        return Named(self.datatypes.get(name, "INT32"))


class Site:
    """What is wanted of a reconciler, and what has come of it."""

    def __init__(self, reconciler: Reconciler, folder: Path) -> None:
        self.reconciler = reconciler
        self._folder = folder
        self._wanted: dict[str, dict[int, ModelFiles]] = {}

    def model(self, name: str, version: int = 1, stamp: int = 0) -> ModelFiles:
        return ModelFiles(name, version, "python", self._folder / name / str(version), stamp)

    def ensemble(self, name: str, *parts: str | Step, stamp: int = 0) -> ModelFiles:
        """One after the other."""
        tensors = ["x", *(f"t{at}" for at in range(1, len(parts))), "y"]
        steps = tuple(
            replace(part, inputs={"x": tensors[at]}, outputs={"y": tensors[at + 1]})
            if isinstance(part, Step)
            else Step(part, {"x": tensors[at]}, {"y": tensors[at + 1]})
            for at, part in enumerate(parts)
        )
        config = ModelConfig(
            "ensemble",
            inputs=[TensorConfig("x", "INT32", [-1])],
            outputs=[TensorConfig("y", "INT32", [-1])],
            ensemble=steps,
            source=f"{name}/config.pbtxt",
        )
        return ModelFiles(name, 1, "ensemble", self._folder / name / "1", stamp, config=config)

    def want(self, *versions: ModelFiles, without: Collection[str] = ()) -> None:
        """These, too; and nothing of the models `without`."""
        for files in versions:
            self._wanted[files.name] = {**self._wanted.get(files.name, {}), files.version: files}
        for name in without:
            del self._wanted[name]
        self.reconciler.want({name: dict(versions) for name, versions in self._wanted.items()})

    def state(self, name: str, version: int = 1) -> State:
        return next(
            status.state for status in self.reconciler.registry.statuses(name) if status.files.version == version
        )

    def reason(self, name: str) -> str:
        return self.reconciler.registry.statuses(name)[0].reason

    def waits(self, name: str) -> bool:
        """Whether an ensemble has been loaded and waits for its parts."""
        return self.reconciler.dependents.is_waiting(name)

    async def until(self, **states: State) -> None:
        await until(lambda: {name: self.state(name) for name in states} == states)
