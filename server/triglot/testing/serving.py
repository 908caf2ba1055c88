"""Servers for tests, on free ports: in this process, or as a process of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from triglot.config.option_fields import flag_of
from triglot.config.options import Config
from triglot.config.sources import load_config
from triglot.inline import FREE_PORTS, RunningServer, Served, ServedAt, roots_of, running
from triglot.repository.scan.source import NamedPath, Root
from triglot.testing.process import Process

QUICK: Mapping[str, Any] = {"drain_delay": 0.0, "grace": 1.0}
"""Options of a server that no load balancer knows, and of which no call is to be waited for."""


@overload
def serve(
    *models: Served | Mapping[str, Served], process: Literal[False] = False, **options: Any
) -> RunningServer: ...


@overload
def serve(*models: Served | Mapping[str, Served], process: Literal[True], **options: Any) -> ServerProcess: ...


def serve(
    *models: Served | Mapping[str, Served], process: bool = False, **options: Any
) -> RunningServer | ServerProcess:
    """Return a server that runs during a block, `with` or `async with`, on free ports.

    Models and options are as in `triglot.running`, but `drain_delay` is 0, and `grace` a second. `process`: run
    `triglot serve` as a process, which serves paths only. Raise as `triglot.running` does; beginning the block of
    a process raises `ChildProcessError` with its log if it does not start.
    """
    if not process:
        return running(*models, **{**QUICK, **options})
    config = load_config(None, os.environ, options, defaults={**FREE_PORTS, **QUICK})
    words = [_word(root) for root in roots_of(models)]
    for name, value in {**FREE_PORTS, **QUICK, **options}.items():
        flag = flag_of(name)
        words.append(f"{flag}={value}" if not isinstance(value, bool) else flag if value else f"--no-{flag[2:]}")
    return ServerProcess(words, config)


def _word(root: Root) -> str:
    """Return how the command line names what a server loads."""
    if isinstance(root, NamedPath):
        return f"{root.name}={root.path}"
    if isinstance(root, Path):
        return str(root) if root.is_absolute() or "=" not in str(root) else f"./{root}"
    raise TypeError(f"a server that is a process: expected the path of a model, or a dict of paths, got {root}")


class ServerProcess(ServedAt):
    """`triglot serve` as a process, for a block: `with` or `async with`, one at a time."""

    def __init__(self, words: Sequence[str], config: Config) -> None:
        super().__init__(config)
        self._command = [sys.executable, "-m", "triglot", "serve", *words]
        self._process: Process | None = None
        self._ports = (0, 0)

    @property
    def process(self) -> Process:
        """The process: its `pid`, what it logs, and signals to it."""
        if self._process is None:
            raise RuntimeError("the server does not run: expected to be inside of its `with` block")
        return self._process

    @property
    def grpc_port(self) -> int:
        """The port for gRPC."""
        return self._ports[0]

    @property
    def rest_port(self) -> int:
        """The port for REST."""
        return self._ports[1]

    def __enter__(self) -> ServerProcess:
        started = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        process = Process(started)
        try:
            self._ports = process.ports()
        except AssertionError:
            process.kill()
            raise ChildProcessError(f"the server has not started:\n{process.stderr.text()}") from None
        except BaseException:
            process.kill()
            raise
        self._process = process
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self.process, None
        try:
            if process.runs and error is None:
                process.stop()
        finally:
            process.kill()

    async def __aenter__(self) -> ServerProcess:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)
