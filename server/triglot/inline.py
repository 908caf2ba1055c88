"""Serves models from Python: `serve` in a script, `running` in a notebook or a test."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from triglot import parts
from triglot.config.options import Config
from triglot.config.sources import load_config
from triglot.core.errors import MissingDependency
from triglot.dataplane.control import Control
from triglot.model.model import Model
from triglot.repository.config.settings import NAME, NAME_RULE
from triglot.repository.scan.source import ModelFiles, NamedPath, Root
from triglot.run import DEMO, Start, loop_factory, run, set_up_logging
from triglot.server import Server

Served = Model | type[Model] | str | Path
"""A model: an object or a class, the path of a model or a repository, or the URL of one."""
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
FREE_PORTS: Final = {"grpc_port": 0, "rest_port": 0}


def serve(*models: Served | Mapping[str, Served], **options: Any) -> None:
    """Serve models until Ctrl-C or SIGTERM; blocks.

    `models`: a class `MyModel` is served as `my_model`, and a dict gives its values their names; without any, the
    embedded demo. `options` are those of `triglot serve`, as in its TOML file: `rest_port=9000`. Variables
    `TRIGLOT_*` count, too.

    Raise `ConfigError` for a wrong option, `TypeError` and `ValueError` for what is no model and no name, and
    `SystemExit` if the server cannot start: the log says why. To be called on the main thread, without an event
    loop that runs.
    """
    if _loop_runs() or threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "serve blocks, and handles signals: expected the main thread, and no event loop that runs; in a "
            "notebook, a test or a coroutine, use `with triglot.running(...) as server:`"
        )
    config = load_config(None, os.environ, options)
    start = Start(config, list(roots_of(models)) or [DEMO], skip_missing_dependencies=not models)
    if status := run(start, set_up_logging(config), Control()):
        raise SystemExit(status)


def running(*models: Served | Mapping[str, Served], **options: Any) -> RunningServer:
    """Return a server that runs during a block: `with`, on a thread, or `async with`, on the block's event loop.

    Models and options are as in `serve`, but the ports are free ones unless they are given. Raise `ConfigError`,
    `TypeError` and `ValueError` as `serve` does; beginning the block raises `ModelLoadError` and `OSError`.
    """
    config = load_config(None, os.environ, options, defaults=FREE_PORTS)
    return RunningServer(config, list(roots_of(models)) or [DEMO], skip_missing_dependencies=not models)


class ServedAt(ABC):
    """Where a server that runs is reached."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    @abstractmethod
    def grpc_port(self) -> int:
        """The port for gRPC."""

    @property
    @abstractmethod
    def rest_port(self) -> int:
        """The port for REST."""

    @property
    def grpc_address(self) -> str:
        """What gRPC clients connect to: `127.0.0.1:8001`."""
        return self._config.local_address(self.grpc_port)

    @property
    def url(self) -> str:
        """What REST clients connect to, and the monitor page: `http://127.0.0.1:8000`."""
        scheme = "https" if self._config.tls_certificate else "http"
        return f"{scheme}://{self._config.local_address(self.rest_port)}"


class RunningServer(ServedAt):
    """A server for a block: `with` or `async with`, one at a time."""

    def __init__(self, config: Config, roots: list[Root], *, skip_missing_dependencies: bool) -> None:
        super().__init__(config)
        self._make = partial(Server, roots, config, skip_missing_dependencies=skip_missing_dependencies)
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None

    @property
    def server(self) -> Server:
        """The server itself. Raise `RuntimeError` outside of the block."""
        if self._server is None:
            raise RuntimeError("the server does not run: expected to be inside of its `with` block")
        return self._server

    @property
    def grpc_port(self) -> int:
        """The port for gRPC."""
        return self.server.grpc_port

    @property
    def rest_port(self) -> int:
        """The port for REST."""
        return self.server.rest_port

    async def __aenter__(self) -> RunningServer:
        server = self._make()
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server = self.server, None
        await server.stop()

    def __enter__(self) -> RunningServer:
        self._started.clear()
        # A daemon: a model that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="triglot", daemon=True)
        self._thread.start()
        self._started.wait()
        self._raise_failure()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._on_end is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._on_end.set)
        self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what ended the thread, if anything did."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory(self._config)) as runner:
                runner.run(self._serve())
        except BaseException as error:  # Raised where the block begins or ends.
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._on_end = asyncio.get_running_loop(), asyncio.Event()
        async with self:
            self._started.set()
            await self._on_end.wait()


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def roots_of(models: Sequence[Served | Mapping[str, Served]]) -> Iterator[Root]:
    """Yield what a server loads for the models that `serve` takes. Raise `TypeError` and `ValueError` as it."""
    for model in models:
        if isinstance(model, Mapping):
            for name, value in model.items():
                if not NAME.fullmatch(name):
                    raise ValueError(f"{name!r} is not a valid model name; {NAME_RULE}")
                yield _root(value, name)
        else:
            yield _root(model)


def _root(model: Served, name: str = "") -> Root:
    if isinstance(model, str | Path):
        return NamedPath(name, Path(model)) if name else Path(model)
    model_class = model if isinstance(model, type) else type(model)
    if not issubclass(model_class, Model):  # What a caller without a type checker may pass.
        raise TypeError(f"expected a triglot.Model, its class, a path, or a dict of these by name, got {model!r}")
    name = name or _WORDS.sub("_", model_class.__name__).lower()
    file = _file_of(model_class)
    return ModelFiles(name, 1, "python", file, single_file=True, make=partial(_make, model, file))


def _make(model: Model | type[Model], file: Path) -> Model:
    try:
        instance_of: Callable[[Model | type[Model], Path], Model] = parts.load_module(
            "backend", "python"
        ).instance_of
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: {error}") from error
    return instance_of(model, file)


def _file_of(model_class: type[Model]) -> Path:
    """Return the file of the class; in a notebook or a shell, a name in the current folder."""
    try:
        file = Path(inspect.getfile(model_class))
    except (OSError, TypeError):
        return Path.cwd() / model_class.__name__
    return file if file.is_file() else Path.cwd() / model_class.__name__
