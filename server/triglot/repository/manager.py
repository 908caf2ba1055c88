"""What is loaded: every model version's state, and the way from a request's model to a servable."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triglot.core.errors import InvalidArgument, MissingDependency, ModelLoadError, ModelNotFound, Unavailable
from triglot.core.model import Model
from triglot.engine.servable import Servable
from triglot.repository.source import VERSION, ModelFiles, find_models

log = logging.getLogger(__name__)

Load = Callable[[str, Path], Model]
"""Makes a loaded model of (backend, file); blocks."""


class State(enum.Enum):
    """A model version's state, in the model repository extension's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class Version:
    """One version: its files, its state and, while it is READY or UNLOADING, its servable."""

    files: ModelFiles
    state: State = State.LOADING
    reason: str = ""
    servable: Servable | None = None

    @property
    def ready(self) -> bool:
        """Whether it serves: loaded, and with an instance alive."""
        return self.state is State.READY and self.servable is not None and self.servable.alive


class Manager:
    """Loads the models of some paths and finds the servable for a request. Lives on the event loop.

    `skip_missing_dependencies`: leave out, with a warning, models whose backend is not installed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        load: Load,
        *,
        max_queue_size: int,
        skip_missing_dependencies: bool = False,
    ) -> None:
        self._paths = paths
        self._load = load
        self._max_queue_size = max_queue_size
        self._skip_missing_dependencies = skip_missing_dependencies
        self._models: dict[str, dict[int, Version]] = {}
        self._default: dict[str, Servable] = {}

    async def load_all(self) -> list[ModelLoadError]:
        """Load every version of every model, in their order; what could not be loaded is returned.

        Raises `ModelLoadError` when the paths themselves are wrong.
        """
        found = await asyncio.to_thread(find_models, self._paths)
        errors: list[ModelLoadError] = []
        for name, versions in found.items():
            self._models[name] = {files.version: Version(files) for files in versions}
        for name, versions in found.items():
            for files in versions:
                error = await self._load_version(self._models[name][files.version])
                if isinstance(error, MissingDependency) and self._skip_missing_dependencies:
                    log.warning("%s is left out: %s", files, error)
                    del self._models[name][files.version]
                elif error is not None:
                    errors.append(error)
            if not self._models[name]:
                del self._models[name]
        return errors

    async def _load_version(self, version: Version) -> ModelLoadError | None:
        files = version.files
        started = time.monotonic()
        try:
            model = await asyncio.to_thread(self._load, files.backend, files.file)
            try:
                version.servable = Servable(files.name, files.version, model, max_queue_size=self._max_queue_size)
            except Exception as error:  # What a user's class declares can be anything.
                with suppress(Exception):
                    await asyncio.to_thread(model.close)
                raise ModelLoadError(f"{files.file}: {type(error).__name__}: {error}") from error
        except ModelLoadError as error:
            version.state, version.reason = State.UNAVAILABLE, str(error)
            return error
        version.state = State.READY
        self._choose_default(files.name)
        log.info("loaded %s (%s) in %.2f s", files, files.backend, time.monotonic() - started)
        return None

    def _choose_default(self, name: str) -> None:
        ready = [number for number, version in self._models[name].items() if version.state is State.READY]
        servable = self._models[name][max(ready)].servable if ready else None
        if servable is None:
            self._default.pop(name, None)
        else:
            self._default[name] = servable

    def servable(self, name: str, version: str = "") -> Servable:
        """The servable that a request for `name` and `version` (empty: the highest that is ready) goes to.

        Raises `ModelNotFound`, `InvalidArgument` for a version that is no positive integer, and `Unavailable`
        for one that exists but is not ready.
        """
        if not version:
            default = self._default.get(name)
            if default is None:
                self._known(name)
                raise ModelNotFound(f"Request for unknown model: '{name}' has no available versions")
            return default
        entry = self.version(name, version)
        if entry.state is not State.READY or entry.servable is None:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return entry.servable

    def version(self, name: str, version: str) -> Version:
        """The entry of one version. Raises `ModelNotFound` or `InvalidArgument`."""
        versions = self._known(name)
        if not VERSION.fullmatch(version):
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}' for model '{name}': "
                "expected a positive integer"
            )
        entry = versions.get(int(version))
        if entry is None:
            raise ModelNotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return entry

    def _known(self, name: str) -> dict[int, Version]:
        versions = self._models.get(name)
        if versions is None:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        return versions

    def ready_versions(self, name: str) -> list[int]:
        """The versions that serve, ascending. Raises `ModelNotFound` for an unknown model."""
        return sorted(number for number, version in self._known(name).items() if version.ready)

    def names(self) -> list[str]:
        """Every model that is wanted, ready or not."""
        return list(self._models)

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a request for `name` and `version` would be run. Raises as `version`."""
        if version:
            return self.version(name, version).ready
        self._known(name)
        servable = self._default.get(name)
        return servable is not None and servable.alive

    def all_ready(self) -> bool:
        """Whether there is a model at all, and every wanted version of every model is ready."""
        return bool(self._models) and all(version.ready for version in self.versions())

    def versions(self) -> Iterable[Version]:
        """Every version of every model, in the order of loading."""
        for versions in self._models.values():
            yield from versions.values()

    async def close(self) -> None:
        """Close every servable. The transports have stopped; a call that still runs is not waited for."""
        self._default.clear()
        await asyncio.gather(*map(self._unload, self.versions()))

    async def _unload(self, version: Version) -> None:
        if version.servable is not None:
            version.state = State.UNLOADING
            await version.servable.close()
            version.state, version.reason, version.servable = State.UNAVAILABLE, "unloaded", None
