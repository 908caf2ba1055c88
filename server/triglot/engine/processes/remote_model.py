"""A model whose instances are processes: what the server has of it."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code, ModelLoadError
from triglot.core.model import Model
from triglot.core.model_config import ModelConfig
from triglot.core.readings import Reading
from triglot.engine.hosted import HostedModel, nobody_to_tell, not_at_all
from triglot.engine.processes.care import CARE, Care
from triglot.engine.processes.pool import Pool
from triglot.engine.processes.process import NotBegun, Process, Program
from triglot.engine.work import Function, Inputs


class RemoteModel(HostedModel):
    """Declares what the model does in its process. To be configured and then started before its first call."""

    def __init__(self, pool: Pool, declared: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(declared["attributes"])
        self.looks_at_call = declared["takes_call"]
        self.execution = "process"
        self._pool = pool

    def start(self) -> None:
        """Have a process for each instance. Raises `ModelLoadError`."""
        pool = self._pool
        pool.sticky = self.sequence_batching is not None
        pool.hang_seconds, pool.longest_run = self.hang_seconds, self.longest_run
        if pool.sticky:
            pool.on_lost = self._lost
        pool.changed = self._changed
        pool.warm = self._warm
        pool.grow(self.instances)

    def _changed(self) -> None:
        self.on_change()

    def _lost(self, number: int) -> None:
        self.on_lost(number, f"{self._pool.program.name}: process {number}")

    def runs_on(self, instance: int) -> None:
        """See `HostedModel`."""
        self._pool.seats.take(instance)

    def _warm(self, process: Process) -> None:
        self.warm_up(self._run_on(process))

    def _run_on(self, process: Process) -> Function:
        return process.run

    def infer(self, inputs: Inputs, call: Call) -> Any:
        """What the model answers. Raises `Unavailable` when its process is lost, and what the model raises."""
        while True:
            # Of a process that was lost before, another one may run the call.
            with suppress(NotBegun), self._pool.borrowed(call) as process:
                return process.run(inputs, call)

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._pool.alive

    def abandon(self) -> None:
        """End the processes that still run a call."""
        self._pool.abandon()

    def close(self) -> None:
        """Have each process close the model and end; blocks for as long."""
        self._pool.close()
        self.warm_up, self.on_lost = not_at_all, nobody_to_tell  # Of whom they are would be kept.

    def readings(self) -> Iterator[Reading]:
        """As `Pool.readings`."""
        return self._pool.readings()


class DecoupledRemoteModel(RemoteModel):
    """One that yields its answers."""

    def infer(self, inputs: Inputs, call: Call) -> Generator[Any, None, None]:
        """The answers as the model yields them; raises as `RemoteModel.infer`."""
        while True:
            with suppress(NotBegun), self._pool.borrowed(call) as process:
                yield from process.stream(inputs, call)
                return

    def _run_on(self, process: Process) -> Function:
        return process.stream


class Loading:
    """Loads a model into processes of its own; `give_up` ends that, on any thread."""

    def __init__(self, load: Callable[[str, Path, ModelConfig], Model], care: Care = CARE) -> None:
        self._load = load
        self._care = care
        self._pool: Pool | None = None
        self._given_up = False

    def __call__(self, name: str, backend: str, file: Path, config: ModelConfig) -> RemoteModel:
        """The model, with one process; `name` is what messages call it. Raises `ModelLoadError`."""
        if not hasattr(socket, "send_fds"):
            raise ModelLoadError(f"{file}: execution: expected 'thread' on {sys.platform}, got 'process'")
        program = Program(name, self._path(file), backend, file, config)
        pool = self._pool = Pool(program, self._care)
        if self._given_up:
            pool.give_up()
        try:
            declared = pool.open()
        except BaseException:
            pool.close()
            raise
        kind = DecoupledRemoteModel if declared["streams"] else RemoteModel
        # Messages say the name of the model's own class.
        named: type[RemoteModel] = type(declared["class"], (kind,), {})
        return named(pool, declared)

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._given_up = True
        if self._pool is not None:
            self._pool.give_up()

    def _path(self, file: Path) -> str:
        load = self._load
        module, name = getattr(load, "__module__", ""), getattr(load, "__qualname__", "")
        with suppress(Exception):
            if getattr(importlib.import_module(module), name) is load:
                return f"{module}:{name}"
        raise ModelLoadError(
            f"{file}: execution: expected 'thread' for what {load!r} loads, which processes cannot import by its "
            "name; got 'process'",
            Code.INVALID_ARGUMENT,
        )
