"""A grps project: loads the models in its folder (grps 5, 6), for a server or for the project's own tests."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from triglot.backends.grps.components import Components
from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.http_values import require_flask
from triglot.backends.grps.model import BatchedGrpsModel, GrpsModel
from triglot.backends.grps.names import ImportNames
from triglot.backends.grps.runner import Failures, ModelRunner, Pool, run_in_sequence
from triglot.backends.grps.settings import INFERENCE_FILE, SERVER_FILE, Batching, ProjectSettings
from triglot.backends.grps.surface import GlobalConf, Registers, import_names
from triglot.core.errors import ModelLoadError
from triglot.model.scheduling import MAX_SECONDS
from triglot.telemetry.monitor import Monitor

MODULES = ("src.customized_converter", "src.customized_inferer")
"""Modules that are imported because they register components."""


class Project(Protocol):
    """What `Executor` uses of the loaded `GrpsProject`."""

    settings: ProjectSettings

    def load_model(self, model_id: str) -> Any:
        """Return the model of this id, loaded."""


class Executor:
    """All models and the DAG of the loaded project.

    Raise `ModelLoadError` for a model that cannot be loaded.
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


class GrpsProject:
    """The models of one project, all in one process. Thread-safe.

    Its modules are imported when the first model is opened, and removed when the last one is closed. Paths in the
    configuration are relative to the process's working directory, which is the project's folder.
    """

    def __init__(self, settings: ProjectSettings, monitor: Monitor) -> None:
        self.settings = settings
        self._monitor = monitor
        self._pool = Pool(settings.server.max_concurrency)
        self._failures = Failures(monitor)
        self._lock = threading.RLock()
        self._users = 0
        self._names: ImportNames | None = None
        self._components: Components | None = None
        self._runners: dict[str, ModelRunner] = {}

    def model(self, name: str, version: str) -> GrpsModel:
        """Return one model, loaded. Raise `ModelLoadError` for errors in it or in the project's modules."""
        model_id = f"{name}-{version}"
        return self._open([model_id], model_id, self.settings.model(model_id).entry)

    def dag(self) -> GrpsModel:
        """Return the DAG with its models loaded. Raise as `model` does."""
        nodes = [model_id for _, model_id in self.settings.dag.nodes]
        return self._open(nodes, "", self.settings.inference_conf["dag"])

    def load(self) -> None:
        """Load all models on this thread, in the order of the file, and keep them. Raise as `model` does."""
        with self._lock:
            self._users += 1
            for entry in self.settings.models:
                self.load_model(entry.id)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Import the project's modules, and provide the names that they need, for the block."""
        with self._lock:
            self._users += 1
        try:
            self._import()
            yield
        finally:
            self._release()

    def load_model(self, model_id: str) -> ModelRunner:
        """Return the model's inferer and converter, loaded once for all users. Raise as `model` does."""
        with self._lock:
            components = self._import()
            if model_id not in self._runners:
                entry = self.settings.model(model_id)
                self._runners[model_id] = ModelRunner(
                    components.inferer(entry),
                    components.converter(entry),
                    self._limited(entry.batching),
                    self._failures,
                )
            return self._runners[model_id]

    def _limited(self, batching: Batching | None) -> Batching | None:
        """Limits the batching: each request of a batch takes a slot of the pool, and delays must be finite."""
        if batching is None:
            return None
        longest = int(MAX_SECONDS * 1e6)
        return Batching(min(batching.max_batch_size, self._pool.size), min(batching.timeout_us, longest))

    def _open(self, model_ids: Sequence[str], model_id: str, description: Mapping[str, Any]) -> GrpsModel:
        with self._lock:
            self._users += 1
            try:
                runners = [self.load_model(each) for each in model_ids]
            except BaseException:
                self._release()
                raise
            arguments = (model_id, description, self._pool, self._failures, self._release)
            if len(runners) == 1 and (batching := runners[0].batching) is not None:
                model: GrpsModel = BatchedGrpsModel(runners[0], batching, *arguments)
            else:
                model = GrpsModel(runners, *arguments)
                each = zip(model_ids, runners, strict=True)
                model.own_batches = {name: runner.batches for name, runner in each if runner.batches is not None}
            model.inputs, model.outputs = runners[0].declared[0], runners[-1].declared[1]
            return model

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._forget()

    def _forget(self) -> None:
        self._runners.clear()
        self._components = None
        if self._names is not None:
            self._names.remove()
            self._names = None

    def _import(self) -> Components:
        """Provide the names and import the project's modules, once."""
        with self._lock:
            if self._components is not None:
                return self._components
            settings = self.settings
            custom_http = settings.server.custom_http
            if custom_http is not None and custom_http.customized_body:
                key = "interface.customized_predict_http.customized_body"
                require_flask(f"{settings.folder / SERVER_FILE}: {key}")
            registers = Registers()
            conf = GlobalConf(settings.server_conf, settings.inference_conf)
            names = import_names(settings.folder, conf, registers, self._monitor, self._own_names())
            names.provide()
            self._names = names
            try:
                for module in MODULES:
                    _import_if_present(settings, module)
            except BaseException:
                self._forget()
                raise
            file = settings.folder / INFERENCE_FILE
            self._components = Components(file, settings.models, registers.inferers, registers.converters)
            return self._components

    def _own_names(self) -> dict[str, dict[str, Callable[[], Any]]]:
        """Return the lazy names that depend on this project."""

        def executor() -> type[Executor]:
            return type("Executor", (Executor,), {"project": self})

        def test_case() -> type[Any]:
            from triglot.backends.grps.test_case import GrpsTest  # noqa: PLC0415

            return type("GrpsTest", (GrpsTest,), {"make_executor": executor()})

        return {"executor.executor": {"Executor": executor}, "test": {"GrpsTest": test_case}}


def _import_if_present(settings: ProjectSettings, module: str) -> None:
    """Import one of the project's modules; a missing module registers nothing."""
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
            return
        file = settings.folder.joinpath(*module.split(".")).with_suffix(".py")
        raise ModelLoadError(f"{file}: {type(error).__name__}: {error}") from error
