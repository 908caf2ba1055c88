"""`Loading`, which loads a model into processes of its own, or into Ray actors."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot.core.errors import Code, ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import AUTO, Model
from triglot.model.ray_options import RAY_DEFAULTS, RayOptions

if TYPE_CHECKING:
    from triglot.executors.process.environment import Environment
    from triglot.executors.process.pool import Pool, RestartPolicy, Start
    from triglot.executors.process.process import Program
    from triglot.executors.process.remote_model import RemoteModel
    from triglot.executors.ray.instance import RayPlace

ANY_CLUSTER = "auto"
"""Address that stands for the Ray cluster of which this machine is a node."""


class Loading:
    """Loads one model into processes of its own, or into actors of the Ray cluster at `ray_address`.

    `load` is called in each process, which imports it by its name. `give_up` cancels the loading.
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
        self._environment: Environment | RayPlace | None = None
        self._pool: Pool | None = None
        self._given_up = False

    def __call__(
        self,
        name: str,
        backend: str,
        file: Path,
        config: ModelConfig,
        folder: Path | None = None,
        ray: RayOptions | None = None,
    ) -> RemoteModel:
        """Returns the model, with one process started. Blocks. Raises `ModelLoadError`.

        `name` identifies it in messages. `folder` contains all files of the model; None: `file` is its only one.
        `ray` are the options of its class; None: the class is not known before a process has loaded it.
        """
        # Few servers have models that run elsewhere.
        from triglot.executors.process.environment import Environment  # noqa: PLC0415
        from triglot.executors.process.pool import DEFAULT_POLICY, Pool  # noqa: PLC0415
        from triglot.executors.process.process import Process, Program  # noqa: PLC0415
        from triglot.executors.process.remote_model import remote_model  # noqa: PLC0415
        from triglot.executors.ray.instance import RayPlace  # noqa: PLC0415

        execution = config.execution or "process"
        if not hasattr(socket, "send_fds"):
            raise ModelLoadError(f"{file}: execution: expected 'thread' on {sys.platform}, got {execution!r}")
        start: Start = Process.start
        environment: Environment | RayPlace
        try:
            options = replace(ray or RAY_DEFAULTS, **config.ray)
        except ValueError as error:
            raise ModelLoadError(f"{file}: {error}", Code.INVALID_ARGUMENT) from None
        if execution == "ray":
            _check_groups(config, options)
            place = (file.absolute().parent, file.name) if folder is None else (folder.absolute(), "")
            environment = RayPlace(self._ray_address, *place)
            start = environment.start
        else:
            environment = Environment(config.environment)
        self._environment = environment
        path = self._path(file, execution)
        program = Program(name, path, backend, file, config, environment, execution, options)
        if self._given_up:
            environment.give_up()
        environment.open()
        pool = self._pool = Pool(program, self._policy or DEFAULT_POLICY, start)
        if self._given_up:
            pool.give_up()
        try:
            declared = pool.open()
            _check_class(program, declared["attributes"], ray)
        except BaseException:
            pool.close()
            raise
        return remote_model(pool, declared)

    def give_up(self) -> None:
        """Cancel the loading. On any thread."""
        self._given_up = True
        if self._environment is not None:
            self._environment.give_up()
        if self._pool is not None:
            self._pool.give_up()

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


def _check_class(program: Program, declared: Mapping[str, Any], ray: RayOptions | None) -> None:
    """Check what the model's class declares about its instances.

    `ray` are the class's options as far as they were known before it was loaded. Raises `ModelLoadError`.
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


def _check_groups(config: ModelConfig, options: RayOptions) -> None:
    """Check the instance groups of a model on Ray.

    Raises `ModelLoadError` for groups with GPU numbers, since the nodes are not known yet, and for several groups
    with `max_instances`.
    """
    if options.max_instances and len(config.instance_groups) > 1:
        raise ModelLoadError(
            f"{config.source}: instance_group: expected at most one with ray_max_instances, "
            f"got {len(config.instance_groups)}",
            Code.INVALID_ARGUMENT,
        )
    for at, group in enumerate(config.instance_groups):
        if group.gpus:
            raise ModelLoadError(
                f"{config.source}: instance_group[{at}].gpus: expected none with execution 'ray', which chooses "
                f"them (see ray_num_gpus), got {list(group.gpus)}",
                Code.INVALID_ARGUMENT,
            )
