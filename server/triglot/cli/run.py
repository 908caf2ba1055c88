"""Serves what a command line asks for, until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triglot import backends
from triglot.cli import tfserving as tfserving_cli
from triglot.cli.hints import hint_lines
from triglot.cli.progress import load_progress
from triglot.cli.tfserving_batching import Batching
from triglot.config.options import Config, ConfigError
from triglot.core.errors import ModelLoadError
from triglot.platform.memory import keep_memory
from triglot.repository.config.settings import ModelSettings, settings_of
from triglot.repository.manager.loader import Load
from triglot.repository.manager.summary import VersionSummary
from triglot.repository.scan.source import ModelFiles, NamedPath
from triglot.telemetry.store import Telemetry
from triglot.transports.listening import raise_file_limit
from triglot.workers.link import RETIRE, Link, Wanted
from triglot.workers.supervisor import supervise
from triglot.workers.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from triglot.server import Server

log = logging.getLogger(__name__)

FAILED = 1
SWITCH_SECONDS = 0.0002
"""How long a model's Python code may hold the interpreter while others wait for it: with Python's own 5 ms, health
takes some 100 ms when two of them compute, for the event loop has to ask again after each thing that it does."""
END_PATIENCE_SECONDS = 2.0
"""What else runs when the server has stopped may take so long to end, as a model's threads may."""
YOUNG_OBJECTS = 2000
"""New ones that have the garbage collector look at them: with Python's 700, which 64 calls at a time make, it does
so every 70 calls, and finds nothing. Larger ones let cycles that hold tensors wait for longer."""


def _nothing() -> None:
    pass


def _no_lines(_: int, __: int) -> Iterable[str]:
    return ()


Report = Callable[[list[VersionSummary], list[ModelLoadError]], object]
"""Gets each version, and what could not be loaded."""


def print_error(text: str) -> None:
    """To standard error."""
    print(f"triglot: {text}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Start:
    """What a command line asks for: models at paths, or `models`, and the file to follow that names them.

    `load` loads the models, `batching` has them batched. `surroundings` is what all of it happens in, by the
    number of the worker. `prepare` is called before anything else, `test` is run in place of serving, and `fails`
    is told why there is no server. `opened` gives lines for the log when the ports, of gRPC and of REST, are open.
    `report`: no port is opened; it is given what would be served and every error, and the models are unloaded.
    See `Server` for `telemetry` and `about`.
    """

    config: Config
    paths: Sequence[Path | NamedPath] = ()
    models: Sequence[ModelSettings | ModelFiles] | None = None
    load: Load = backends.load
    batching: Batching | None = None
    skip_missing_dependencies: bool = False
    config_file: Path | None = None
    poll_seconds: float = 0.0
    warnings: Sequence[str] = ()
    telemetry: Telemetry | None = None
    about: str = ""
    surroundings: Callable[[int], AbstractContextManager[object]] = nullcontext
    prepare: Callable[[], object] = _nothing
    test: Callable[[], bool] | None = None
    fails: Callable[[str], object] = print_error
    opened: Callable[[int, int], Iterable[str]] = _no_lines
    report: Report | None = None


def supervised(start: Start, arguments: Sequence[str]) -> int:
    """Several workers; the exit status. Raises `ConfigError`."""
    try:
        return supervise(start.config, arguments, _loop_factory(start.config))
    except OSError as error:
        start.fails(str(error))
        return FAILED


def run(start: Start, handler: logging.Handler, spec: WorkerSpec | None) -> int:
    """One server, or the worker of `spec`; the exit status. Raises `ConfigError`."""
    loop_factory = _loop_factory(start.config)
    for warning in start.warnings:
        log.warning("%s", warning)
    try:
        if start.test is not None:
            return 0 if start.test() else FAILED
        start.prepare()
        raise_file_limit(start.config)
        if start.config.malloc == "keep":
            keep_memory(os.environ)
        sys.setswitchinterval(SWITCH_SECONDS)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(start, handler, spec))
    except (ModelLoadError, OSError) as error:
        start.fails(str(error))
        return FAILED


def _loop_factory(config: Config) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop; None for Python's own. Raises `ConfigError` where uvloop is not installed."""
    if config.event_loop == "asyncio":
        return None
    try:
        import uvloop  # noqa: PLC0415 - not for Windows.
    except ModuleNotFoundError:
        raise ConfigError("event_loop uvloop: it is not installed; run: pip install uvloop") from None
    return uvloop.new_event_loop


async def _serve(start: Start, handler: logging.Handler, spec: WorkerSpec | None) -> int:
    # Here, so that a wrong flag or --help answers at once.
    from triglot.server import Server  # noqa: PLC0415

    # What is there by now stays, and is hardly garbage: whoever collects that later need not go through it.
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    signals = _listen_for_signals(start.config)
    started_with = start.models or ()
    link = None
    if spec is not None:
        link = await Link.open(spec, signals, strict=start.config.exit_on_load_error)
        start = _configured(start, spec, await link.catch_up())
    config = start.config
    server = Server(
        start.paths,
        config,
        models=start.models,
        load=start.load,
        adapt=start.batching,
        skip_missing_dependencies=start.skip_missing_dependencies,
        telemetry=start.telemetry,
        about=start.about,
        log_handler=handler,
        control=link,
        bound=None if link is None else link.bound,
        started_with=started_with,
    )
    errors: list[ModelLoadError] = []
    loading = server.start() if start.report is None else _load(server, errors)
    with load_progress(handler, server.manager.registry) if spec is None or spec.number == 1 else nullcontext():
        loaded = await _unless_signalled(loading, signals)
    if not loaded:
        return _leave("stopped while loading")
    if start.report is not None:
        start.report(server.summaries(), errors)
        await server.stop()
        return FAILED if errors else 0
    for line in start.opened(server.grpc_port, server.rest_port) if spec is None or spec.number == 1 else ():
        log.info("%s", line)
    hints = hint_lines(server.metadata(), config, server.grpc_port, server.rest_port)
    if link is not None:
        await link.serving(hints)
    for line in hints if link is None else ():
        print(line, flush=True)
    if config.model_control_mode == "none" and start.config_file is None:
        server.manager.settle()
    with _following(start, server):
        notice = await signals.get()
    delay = config.drain_delay if notice is signal.SIGTERM else 0.0
    if notice is RETIRE and not await _unless_signalled(server.retire(), signals):
        return _leave("stopped at once")
    servables = server.manager.registry.all_in_memory()
    if not await _unless_signalled(_stop(server, delay), signals):
        return _leave("stopped at once")
    if await _end_tasks():
        for servable in servables:
            if servable.leases:
                log.warning("%s still runs; the server does not wait for it", servable)
        return _leave("code on the event loop did not end when it was cancelled", 0)
    return 0


async def _load(server: Server, errors: list[ModelLoadError]) -> None:
    """Load the models, and open no port. Raises as `Server.load`."""
    try:
        errors += await server.load()
    except BaseException:
        await server.stop()
        raise


def _configured(start: Start, spec: WorkerSpec, wanted: Wanted) -> Start:
    """What one worker is to do of it, and as things are by now."""
    config = spec.configured(start.config)
    if wanted.models_fail:
        config = replace(config, exit_on_load_error=False)
    models = start.models if wanted.models is None else list(map(settings_of, wanted.models))
    return replace(start, config=config, models=models)


@contextmanager
def _following(start: Start, server: Server) -> Iterator[None]:
    """The models follow the configuration file, if they are to, until the block ends."""
    if start.config_file is None or not start.poll_seconds:
        yield
        return
    following = asyncio.create_task(
        tfserving_cli.follow(start.config_file, start.poll_seconds, server.manager.follow)
    )
    try:
        yield
    finally:
        following.cancel()


def _listen_for_signals(config: Config) -> asyncio.Queue[signal.Signals]:
    """SIGTERM and SIGINT as they come; called before anything is loaded."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    if config.audit_log:
        # Who rotates logs tells their writers so. The next line goes to a new file in any case.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _nothing)
    return signals


async def _unless_signalled(work: Coroutine[Any, Any, None], signals: asyncio.Queue[signal.Signals]) -> bool:
    """Do the work; False when a signal came first. Raises what the work raises."""
    working = asyncio.ensure_future(work)
    signalled = asyncio.ensure_future(signals.get())
    await asyncio.wait([working, signalled], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        return False
    if signalled.done():
        signals.put_nowait(signalled.result())  # Both at once: the signal is for what comes next.
    signalled.cancel()
    await working
    return True


async def _stop(server: Server, delay: float) -> None:
    log.info("stopping; a second signal stops at once")
    await server.drain(delay)
    await server.stop()
    log.info("stopped")


async def _end_tasks() -> bool:
    """Cancel all others; whether one still runs after as long as a model's threads are waited for."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return bool(others) and bool((await asyncio.wait(others, timeout=END_PATIENCE_SECONDS))[1])


def _leave(text: str, status: int = FAILED) -> NoReturn:
    """End the process without waiting for what loads or runs a model."""
    log.warning(text)
    logging.shutdown()
    os._exit(status)
