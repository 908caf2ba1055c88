"""Runs a server, or several workers, as a command line asks, until a signal; and hints how to call its models."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triglot import backends, parts
from triglot.config.options import GRPC_ADDRESS, NO_PORT, Config, ConfigError
from triglot.config.variables import TOKEN_VARIABLE
from triglot.core.errors import ModelLoadError
from triglot.dataplane.control import RETIRE, Control, Wanted
from triglot.model.signature import ModelMetadata
from triglot.platform.memory import keep_memory
from triglot.platform.systemd import ServiceManager
from triglot.progress import load_progress
from triglot.protocols.sample_calls import LARGEST_SAMPLE, first_call, samples_of_model
from triglot.repository.config.settings import ModelSettings, settings_of
from triglot.repository.manager.loader import Adapt, Load
from triglot.repository.manager.summary import VersionSummary
from triglot.repository.scan.source import ModelFiles, Root
from triglot.telemetry.log_handlers import log_handler
from triglot.telemetry.log_settings import JSON, formatter
from triglot.telemetry.store import Telemetry
from triglot.transports.listening import raise_file_limit

if TYPE_CHECKING:
    from triglot.server import Server

log = logging.getLogger(__name__)

FAILED = 1
DEMO = Path(__file__).parent / "demo"
SWITCH_SECONDS = 0.0002
"""Seconds that a thread may hold the interpreter's lock while others wait for it. With Python's own 5 ms, health
checks take some 100 ms while two models compute, as the event loop has to reacquire the lock after each
operation."""
END_TIMEOUT_SECONDS = 2.0
"""Seconds that remaining tasks, and models' threads, may take to end after the server has stopped."""
YOUNG_OBJECTS = 2000
"""New objects that trigger a garbage collection. With Python's 700, 64 concurrent calls trigger one every 70
calls, which finds nothing. A larger number would keep cycles that hold tensors for longer."""


def _nothing() -> None:
    pass


def _no_lines(_: int, __: int) -> Iterable[str]:
    return ()


Apply = Callable[[list[ModelSettings]], Awaitable[object]]
"""Serves the models of a new list: `Manager.follow`, which logs changes and load errors."""
Report = Callable[[list[VersionSummary], list[ModelLoadError]], object]
"""Receives a summary per version, and the load errors."""


def print_error(text: str) -> None:
    """Print an error to standard error."""
    print(f"triglot: {text}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Start:
    """What a command line starts.

    Attributes:
        paths: Paths of the models.
        models: The models, instead of `paths`.
        load: Loads a model.
        adapt: Completes each loaded model.
        follow: Applies a list of models whenever it changes, by the function that it gets, until cancelled.
        surroundings: Context in which everything runs, by worker number.
        prepare: Called first.
        test: Called instead of serving; returns whether it passed.
        fails: Called with the reason when the server cannot start.
        load_hint: What to add to it if models could not be loaded.
        opened: Return lines to log when the ports, of gRPC and of REST, are open.
        try_calls: Whether each model is called with made inputs before `report`.
        report: Called with summaries and errors after the load, instead of opening ports; then models are
            unloaded.
        telemetry, about: See `Server`.
    """

    config: Config
    paths: Sequence[Root] = ()
    models: Sequence[ModelSettings | ModelFiles] | None = None
    load: Load = backends.load
    adapt: Adapt | None = None
    follow: Callable[[Apply], Coroutine[Any, Any, None]] | None = None
    skip_missing_dependencies: bool = False
    warnings: Sequence[str] = ()
    telemetry: Telemetry | None = None
    about: str = ""
    surroundings: Callable[[int], AbstractContextManager[object]] = nullcontext
    prepare: Callable[[], object] = _nothing
    test: Callable[[], bool] | None = None
    fails: Callable[[str], object] = print_error
    load_hint: str = ""
    opened: Callable[[int, int], Iterable[str]] = _no_lines
    try_calls: bool = False
    report: Report | None = None


def supervised(start: Start, arguments: Sequence[str]) -> int:
    """Run several workers and return the exit status. Raise `ConfigError` without the part that does."""
    try:
        supervise: Callable[[Config, Sequence[str], ServiceManager], int] = parts.load("part", "workers")
    except parts.MissingPart as error:
        raise ConfigError(f"workers: {error}") from error
    try:
        return supervise(start.config, arguments, ServiceManager.take(os.environ))
    except OSError as error:
        start.fails(str(error))
        return FAILED


def set_up_logging(config: Config, worker: int = 0) -> logging.Handler:
    """Return the log handler of the server, or of one of several workers; see `formatter`.

    Raise `ConfigError` for a log_file that cannot be written.
    """
    try:
        handler = log_handler(config.log_file)
    except OSError as error:
        raise ConfigError(f"log_file: cannot write {config.log_file}: {error.strerror}") from None
    handler.setFormatter(formatter(config.log_format, worker))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    if config.log_format == JSON:  # Python would print warnings to standard error, as text of two lines.
        logging.captureWarnings(True)
    # The gRPC library itself prints a line to standard error for each failed TLS handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # grpc logs a traceback for every client that disconnects during a call.
    logging.getLogger("grpc._cython.cygrpc").addFilter(
        lambda record: "ExecuteBatchError" not in str(record.msg) or config.log_level == "debug"
    )
    return handler


def run(start: Start, handler: logging.Handler, control: Control) -> int:
    """Run a single server, or a worker; return the exit status. Raise `ConfigError`."""
    new_loop = loop_factory(start.config)
    service_manager = ServiceManager.take(os.environ)
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
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(_serve(start, handler, control, service_manager))
    except ModelLoadError as error:
        is_of_some = isinstance(error.__cause__, ModelLoadError)  # Else the paths hold no model.
        start.fails(f"{error}{start.load_hint if is_of_some else ''}")
        return FAILED
    except OSError as error:
        start.fails(str(error))
        return FAILED


def loop_factory(config: Config) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the event loop; None for Python's own. Raise `ConfigError` if uvloop is missing."""
    if config.event_loop == "asyncio":
        return None
    try:
        import uvloop  # noqa: PLC0415 - unavailable on Windows.
    except ModuleNotFoundError:
        raise ConfigError("event_loop uvloop: it is not installed; run: pip install uvloop") from None
    return uvloop.new_event_loop


async def _serve(start: Start, handler: logging.Handler, control: Control, service_manager: ServiceManager) -> int:
    # Imported here, so that --help and errors in flags are quick.
    from triglot.server import Server  # noqa: PLC0415

    # Current objects stay, so garbage collections need not traverse them.
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    signals = _listen_for_signals(start.config)
    started_with = start.models or ()
    await control.open(signals, strict=start.config.exit_on_load_error)
    start = _configured(start, control, await control.catch_up())
    config = start.config
    server = Server(
        start.paths,
        config,
        models=start.models,
        load=start.load,
        adapt=start.adapt,
        skip_missing_dependencies=start.skip_missing_dependencies,
        telemetry=start.telemetry,
        about=start.about,
        log_handler=handler,
        control=control,
        started_with=started_with,
    )
    errors: list[ModelLoadError] = []
    loading = server.start() if start.report is None else _load(server, errors)
    with load_progress(handler, server.manager.registry) if control.number == 1 else nullcontext():
        loaded = await _run_unless_signalled(loading, signals)
    if not loaded:
        service_manager.stopping()
        return _exit("stopped while loading")
    if start.report is not None:
        errors += await server.try_calls() if start.try_calls else []
        start.report(server.summaries(), errors)
        await server.stop()
        return FAILED if errors else 0
    for line in start.opened(server.grpc_port, server.rest_port) if control.number == 1 else ():
        log.info("%s", line)
    hints = hint_lines(server.metadata(), config, server.grpc_port, server.rest_port, server.pages)
    await control.serving(hints)
    for line in hints if control.single_process else ():
        print(line, flush=True)
    if config.model_control_mode == "none" and start.follow is None:
        server.manager.settle()
    service_manager.ready()
    watchdog = asyncio.create_task(service_manager.feed_watchdog())
    with _follow_models(start, server):
        notice = await signals.get()
    service_manager.stopping()
    delay = config.drain_delay if notice is signal.SIGTERM else 0.0
    if notice is RETIRE and not await _run_unless_signalled(server.retire(), signals):
        return _exit("stopped at once")
    servables = server.manager.registry.all_in_memory()
    if not await _run_unless_signalled(_stop(server, delay), signals):
        return _exit("stopped at once")
    watchdog.cancel()
    if await _end_tasks():
        for servable in servables:
            if servable.leases:
                log.warning("%s still runs; the server does not wait for it", servable)
        return _exit("code on the event loop did not end when it was cancelled", 0)
    return 0


async def _load(server: Server, errors: list[ModelLoadError]) -> None:
    """Load the models without opening a port. Raise as `Server.load` does."""
    try:
        errors += await server.load()
    except BaseException:
        await server.stop()
        raise


def _configured(start: Start, control: Control, wanted: Wanted) -> Start:
    """Return the start for this process, with the current list of models."""
    config = control.configured(start.config)
    if wanted.models_fail:
        config = replace(config, exit_on_load_error=False)
    models = start.models if wanted.models is None else list(map(settings_of, wanted.models))
    return replace(start, config=config, models=models)


@contextmanager
def _follow_models(start: Start, server: Server) -> Iterator[None]:
    """Apply changes of the list of models, if these are to be followed, during the block."""
    if start.follow is None:
        yield
        return
    following = asyncio.create_task(start.follow(server.manager.follow))
    try:
        yield
    finally:
        following.cancel()


def _listen_for_signals(config: Config) -> asyncio.Queue[signal.Signals]:
    """Return a queue of received SIGTERM and SIGINT; called before anything is loaded."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    if config.rotated_files:
        # Log rotation signals the writer; the next line goes to a new file anyway.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _nothing)
    return signals


async def _run_unless_signalled(work: Coroutine[Any, Any, None], signals: asyncio.Queue[signal.Signals]) -> bool:
    """Run the work; return False if a signal arrives first. Raise the exceptions of the work."""
    working = asyncio.ensure_future(work)
    signalled = asyncio.ensure_future(signals.get())
    await asyncio.wait([working, signalled], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        return False
    if signalled.done():
        signals.put_nowait(signalled.result())  # Both at once: the signal applies to what follows.
    signalled.cancel()
    await working
    return True


async def _stop(server: Server, delay: float) -> None:
    calls = [
        f"{version} ({version.leases})" for version in server.manager.registry.all_in_memory() if version.leases
    ]
    waits = f" waits up to {server.config.grace:g} s for calls of {', '.join(calls)};" if calls else ""
    log.info("stopping;%s a second signal stops at once", waits)
    await server.drain(delay)
    await server.stop()
    log.info("stopped")


async def _end_tasks() -> bool:
    """Cancel all other tasks; return whether one still runs after the timeout."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return bool(others) and bool((await asyncio.wait(others, timeout=END_TIMEOUT_SECONDS))[1])


def _exit(text: str, status: int = FAILED) -> NoReturn:
    """End the process without waiting for threads that load or run a model."""
    log.warning(text)
    logging.shutdown()
    os._exit(status)


TOKEN = f'-H "authorization: Bearer ${TOKEN_VARIABLE}" '


def hint_lines(
    models: list[ModelMetadata], config: Config, grpc_port: int, rest_port: int, pages: Mapping[str, str]
) -> list[str]:
    """Return lines to paste: where the `pages` are, and how to call the first model whose inputs fit on a line.

    `pages`: paths by name. With TLS, curl accepts any certificate, as the server's public name is unknown; if
    clients need certificates there are no lines. With an access file they use the token in TRIGLOT_TOKEN.
    """
    if config.tls_client_ca:
        return []
    tls = bool(config.tls_certificate)
    server = f"{'https' if tls else 'http'}://{config.local_address(rest_port)}"
    lines = [f"# {name}: {server}{path}" for name, path in pages.items()]
    for model in models:
        call = first_call(model, config.protocol_names, grps_customized_body=config.grps_customized_body)
        if call is None:
            continue
        if "kserve" in config.protocol_names and config.grpc_port != NO_PORT and not tls:
            address = config.local_address(grpc_port)
            url = "" if address == GRPC_ADDRESS else f" --url {address}"
            own = samples_of_model(model, LARGEST_SAMPLE)
            inputs = [f"{sample.name}={json.dumps(sample.nested(), ensure_ascii=False)}" for sample in own]
            lines.append(f"{_program()} infer {shlex.join([model.name, *inputs])}{url}")
        if config.rest_port != NO_PORT:
            token = TOKEN if config.access else ""
            header = ("-H 'Content-Type: application/json' " if call.json else "") + token
            body = shlex.quote(json.dumps(call.body))
            lines.append(f"curl {'-sk' if tls else '-s'} {server}{call.path} {header}-d {body}")
        break
    return lines


def _program() -> str:
    """Return how a shell in this folder runs this installation."""
    own = Path(sys.executable).with_name("triglot")
    found = shutil.which("triglot")
    if found is not None and Path(found) == own:
        return "triglot"
    if not own.exists():
        return f"{shlex.quote(sys.executable)} -m triglot"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))
