"""Loads a model into processes of its own."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from triglot.core.errors import Code, ModelLoadError
from triglot.executors.process.environment import Environment
from triglot.executors.process.monitor import DEFAULT_POLICY, RestartPolicy
from triglot.executors.process.pool import Pool
from triglot.executors.process.process import Program
from triglot.executors.process.remote_model import RemoteModel, remote_model
from triglot.model.config import ModelConfig
from triglot.model.model import Model


class Loading:
    """Loads a model into processes of its own; `give_up` ends that, on any thread."""

    def __init__(
        self, load: Callable[[str, Path, ModelConfig], Model], policy: RestartPolicy = DEFAULT_POLICY
    ) -> None:
        self._load = load
        self._policy = policy
        self._environment: Environment | None = None
        self._pool: Pool | None = None
        self._given_up = False

    def __call__(self, name: str, backend: str, file: Path, config: ModelConfig) -> RemoteModel:
        """The model, with one process; `name` is what messages call it. Raises `ModelLoadError`."""
        if not hasattr(socket, "send_fds"):
            raise ModelLoadError(f"{file}: execution: expected 'thread' on {sys.platform}, got 'process'")
        environment = self._environment = Environment(config.environment)
        program = Program(name, self._path(file), backend, file, config, environment)
        if self._given_up:
            environment.give_up()
        environment.open()
        pool = self._pool = Pool(program, self._policy)
        if self._given_up:
            pool.give_up()
        try:
            declared = pool.open()
        except BaseException:
            pool.close()
            raise
        return remote_model(pool, declared)

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._given_up = True
        if self._environment is not None:
            self._environment.give_up()
        if self._pool is not None:
            self._pool.give_up()

    def _path(self, file: Path) -> str:
        load = self._load
        module, name = getattr(load, "__module__", ""), getattr(load, "__qualname__", "")
        with suppress(Exception):
            if getattr(importlib.import_module(module), name) is load:
                return f"{module}:{name}"
        raise ModelLoadError(
            f"{file}: execution: expected 'thread', got 'process': processes cannot import {load!r} by its name",
            Code.INVALID_ARGUMENT,
        )
