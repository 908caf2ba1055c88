"""`Executor`: runs a project's models without a server, for the project's own tests (grps 6.1)."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.runner import run_in_sequence
from triglot.backends.grps.settings import ProjectSettings


class Project(Protocol):
    """What `Executor` uses of the loaded `GrpsProject`."""

    settings: ProjectSettings

    def load_model(self, model_id: str) -> Any:
        """Return the model of this id, loaded."""


class Executor:
    """All models and the DAG of the loaded project.

    Raises `ModelLoadError` for a model that cannot be loaded.
    """

    project: ClassVar[Project]

    def __init__(self) -> None:
        settings = self.project.settings
        self._models = {entry.id: self.project.load_model(entry.id) for entry in settings.models}
        self._dag = [self._models[model_id] for _, model_id in settings.dag.nodes]

    def infer(self, inp: Any, context: GrpsContext, model_name: str | None = None) -> Any:
        """Run the DAG, or the model `model_name` ("name-version"), on a GrpsMessage and return the output.

        None once the context has an error. Raise the exceptions of the project's code, and `RuntimeError` for an
        unknown model.
        """
        if not model_name:
            return run_in_sequence(self._dag, inp, context)
        if model_name not in self._models:
            raise RuntimeError(f"Model {model_name} not found.")
        return run_in_sequence([self._models[model_name]], inp, context)
