"""What an executor of instances outside of the server's process is: a `Place`, which starts each `Body`."""

from __future__ import annotations

import os
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from triglot.model.config import ModelConfig
from triglot.model.ray_options import RAY_DEFAULTS, RayOptions


@dataclass(frozen=True, slots=True)
class Program:
    """What a process loads.

    `name` identifies the model in messages. `load` is the import path, "module:name", of a function that returns
    the model, given `backend`, `file` and `config`. `folder` contains all files of the model; None: `file` is its
    only one. `ray` and `ray_address` are for actors.
    """

    name: str
    load: str
    backend: str
    file: Path
    config: ModelConfig = field(repr=False)
    execution: str = "process"
    folder: Path | None = None
    ray: RayOptions = RAY_DEFAULTS
    ray_address: str = ""

    @property
    def kind(self) -> str:
        """Word for one of its processes in messages: "process" or "actor"."""
        return "actor" if self.execution == "ray" else self.execution


class Body(ABC):
    """A process of the operating system, or an actor of a cluster, that runs one instance.

    Any thread may use it. `remote`: it may run on another machine. `pid` is its process id on its machine, and
    `where` says for messages what it is. `begun` is the instant of `time.monotonic` at which it began to run, None
    before. `labels` of metrics name its machine; they are empty if that is always the server's. `moved` are the
    folder of the model's files on the server's machine and that on its own, None if they are the same.
    """

    remote: ClassVar[bool] = False
    pid = 0
    where = ""
    begun: float | None = None
    labels: Mapping[str, str] = {}
    moved: tuple[Path, Path] | None = None

    @abstractmethod
    def connect(self) -> socket.socket:
        """Return the connection to it, once it runs. Blocks. Raise `ModelLoadError`."""

    @abstractmethod
    def exit_reason(self) -> str:
        """Return why it has ended; "" while it runs."""

    @abstractmethod
    def why_closed(self) -> str:
        """Return why its connection is closed, as far as that is known within a short time. Blocks."""

    @abstractmethod
    def wait(self, timeout: float | None) -> bool:
        """Return True once it has ended, or False after `timeout` seconds. Blocks."""

    @abstractmethod
    def terminate(self) -> None:
        """Have it end soon."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


class Place(ABC):
    """Where the processes of one model run: a Python environment of this machine, or a cluster."""

    @abstractmethod
    def open(self) -> None:
        """Get ready to `start`. Blocks. Raise `ModelLoadError`."""

    @abstractmethod
    def cancel_load(self) -> None:
        """Cancel `open`. On any thread."""

    @abstractmethod
    def start(self, program: Program, number: int) -> Body:
        """Start the process of an instance. It ends with the thread that calls this. Raise `OSError`."""

    @abstractmethod
    def close(self) -> None:
        """Release it; no more processes run there."""


def log_descriptor() -> int:
    """Return the stdout and stderr for processes that the server starts: stderr if open, else `DEVNULL`."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
