"""`Loading`, which loads a model into instances outside of the server's process: the executors that are parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot import parts
from triglot.core.errors import Code, MissingDependency, ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import AUTO, Model
from triglot.model.ray_options import RAY_DEFAULTS, RayOptions

if TYPE_CHECKING:
    from triglot.executors.remote.place import Place, Program
    from triglot.executors.remote.pool import Pool, RestartPolicy
    from triglot.executors.remote.remote_model import RemoteModel

ANY_CLUSTER = "auto"
"""Address that stands for the Ray cluster of which this machine is a node."""


class Loading:
    """Loads one model into processes of its own, or into actors of the Ray cluster at `ray_address`.

    `load` is called in each process, which imports it by its name. `cancel_load` cancels the loading.
    """

    def __init__(
        self,
        load: Callable[[str, Path, ModelConfig], Model],
        policy: RestartPolicy | None = None,
        ray_address: str = ANY_CLUSTER,
    ) -> None:
        self._load = load
        self._policy = policy
        self._ray_address = ray_address
        self._place: Place | None = None
        self._pool: Pool | None = None
        self._load_cancelled = False

    def __call__(
        self,
        name: str,
        backend: str,
        file: Path,
        config: ModelConfig,
        folder: Path | None = None,
        ray: RayOptions | None = None,
    ) -> RemoteModel:
        """Return the model, with one process started. Blocks. Raise `ModelLoadError`.

        `name` identifies it in messages. `folder` contains all files of the model; None: `file` is its only one.
        `ray` are the options of its class; None: the class is not known before a process has loaded it.
        """
        execution = config.execution or "process"
        make_place = _place_of(execution, file)
        # Few servers have models that run elsewhere.
        from triglot.executors.remote.place import Program  # noqa: PLC0415
        from triglot.executors.remote.pool import DEFAULT_POLICY, Pool  # noqa: PLC0415
        from triglot.executors.remote.remote_model import remote_model  # noqa: PLC0415

        try:
            options = replace(ray or RAY_DEFAULTS, **config.ray)
        except ValueError as error:
            raise ModelLoadError(f"{file}: {error}", Code.INVALID_ARGUMENT) from None
        path = self._path(file, execution)
        program = Program(name, path, backend, file, config, execution, folder, options, self._ray_address)
        place = self._place = make_place(program)
        if self._load_cancelled:
            place.cancel_load()
        place.open()
        pool = self._pool = Pool(program, place, self._policy or DEFAULT_POLICY)
        if self._load_cancelled:
            pool.cancel_load()
        try:
            declared = pool.open()
            _check_class(program, declared["attributes"], ray)
        except BaseException:
            pool.close()
            raise
        return remote_model(pool, declared)

    def cancel_load(self) -> None:
        """Cancel the loading. On any thread."""
        self._load_cancelled = True
        if self._place is not None:
            self._place.cancel_load()
        if self._pool is not None:
            self._pool.cancel_load()

    def _path(self, file: Path, execution: str) -> str:
        load = self._load
        module, name = getattr(load, "__module__", ""), getattr(load, "__qualname__", "")
        with suppress(Exception):
            if getattr(importlib.import_module(module), name) is load:
                return f"{module}:{name}"
        raise ModelLoadError(
            f"{file}: execution: expected 'thread', got {execution!r}: processes cannot import {load!r} by its "
            "name",
            Code.INVALID_ARGUMENT,
        )


def _place_of(execution: str, file: Path) -> Callable[[Program], Place]:
    """Return what makes the place of the model's processes. Raise `MissingDependency` without that part."""
    try:
        make: Callable[[Program], Place] = parts.load("executor", execution)
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: {error}") from error
    return make


def _check_class(program: Program, declared: Mapping[str, Any], ray: RayOptions | None) -> None:
    """Check what the model's class declares about its instances.

    `ray` are the class's options as far as they were known before it was loaded. Raise `ModelLoadError`.
    """
    error = ""
    if program.execution != "ray":
        if declared["instances"] == AUTO and not program.config.instance_groups:
            error = f"instances: expected an integer with execution {program.execution!r}, got {AUTO!r}"
    elif ray is None and declared["ray"] != RAY_DEFAULTS:
        error = (
            "ray: expected no options in the class with parameters[execution] 'ray': set parameters[ray_...], or "
            "say execution in the class only"
        )
    if error:
        raise ModelLoadError(f"{program.file}: {error}", Code.INVALID_ARGUMENT)
