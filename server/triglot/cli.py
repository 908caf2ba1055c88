"""The command line: `triglot serve`, and the other commands as far as they are the same."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triglot import grps_cli, tfserving_cli
from triglot.config import OPTIONS, Config, ConfigError, flag_of, option_type, unknown
from triglot.config_sources import load_config, vertex_model
from triglot.core.errors import ModelLoadError
from triglot.hints import hint_lines
from triglot.repository.settings import ModelSettings
from triglot.repository.source import ModelFiles
from triglot.telemetry.log_settings import formatter
from triglot.telemetry.store import Telemetry
from triglot.tfserving_batching import Batching
from triglot.triton_flags import in_place_of
from triglot.version import __version__

if TYPE_CHECKING:
    from triglot.app import Server

log = logging.getLogger(__name__)

POLL: Mapping[str, Any] = {"model_control_mode": "poll"}
WATCHING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "watch": ("follow the file system: short for --model-control-mode poll", POLL),
    "reload": (
        "while you write a model: --watch with two looks a second; code that does not load leaves the old one "
        "serving",
        {**POLL, "poll_interval": 0.5},
    ),
}
"""Flags of `serve` that stand for options: their help, and the options."""
JOINED = ("load_model",)
"""Options whose flag may come more than once, as it does for Triton; its values add up."""
DEMO = Path(__file__).parent / "demo"
SWITCH_SECONDS = 0.0002
"""How long a model's Python code may hold the interpreter while others wait for it: with Python's own 5 ms, health
takes some 100 ms when two of them compute, for the event loop has to ask again after each thing that it does."""
END_PATIENCE_SECONDS = 2.0
"""What else runs when the server has stopped may take so long to end, as a model's threads may."""
FAILED, WRONG_USE = 1, 2


def _nothing() -> None:
    pass


def _print(text: str) -> None:
    print(f"triglot: {text}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Start:
    """What a command line asks for: models at paths, or `models`, and the file to follow that names them.

    `batching` has the models batched. `around` is what all of it happens in, `prepare` is called before anything
    else, `test` is run in place of serving, and `fails` is told why there is no server. See `Server` for
    `telemetry` and `about`.
    """

    config: Config
    paths: Sequence[Path] = ()
    models: Sequence[ModelSettings | ModelFiles] | None = None
    batching: Batching | None = None
    skip_missing_dependencies: bool = False
    config_file: Path | None = None
    poll_seconds: float = 0.0
    warnings: Sequence[str] = ()
    telemetry: Telemetry | None = None
    about: str = ""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    prepare: Callable[[], object] = _nothing
    test: Callable[[], bool] | None = None
    fails: Callable[[str], object] = _print


class _Joined(argparse.Action):
    """A flag whose further values are added to its first, with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        before = [getattr(namespace, self.dest)] if hasattr(namespace, self.dest) else []
        setattr(namespace, self.dest, ",".join([*before, values]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triglot",
        description="An inference server for KServe V2, TensorFlow Serving and grps clients.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triglot {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve models", allow_abbrev=False)
    serve.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a repository folder (NAME/[VERSION/]files), a model folder, or a model file; "
        "without one, the embedded demo models",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with the options below as keys")
    for name, (help_text, _) in WATCHING.items():
        serve.add_argument(f"--{name}", action="store_true", help=help_text)
    for name, option in OPTIONS.items():
        flag = flag_of(name)
        text = f"{option.metadata['help']} (default: {option.default})"
        if name in JOINED:
            serve.add_argument(flag, action=_Joined, default=argparse.SUPPRESS, metavar="VALUE", help=text)
        elif option_type(name) is bool:
            serve.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            serve.add_argument(flag, type=option_type(name), default=argparse.SUPPRESS, metavar="VALUE", help=text)
    tfserving_cli.add_parser(commands)
    grps_cli.add_parser(commands)
    return parser


def _flags() -> list[str]:
    negated = [flag_of(f"no_{name}") for name in OPTIONS if option_type(name) is bool]
    watching = [f"--{name}" for name in WATCHING]
    return ["--config", "--help", *watching, *map(flag_of, OPTIONS), *negated]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit status."""
    parser = _parser()
    known, others = parser.parse_known_args(arguments)
    flags = vars(known)
    command = flags.pop("command")
    for other in others:
        if other.startswith("-"):
            flag = other.split("=")[0]
            ours = in_place_of(flag) if command == "serve" else ""
            parser.error(f"unknown option {flag!r}{ours}" if ours else unknown(flag, _FLAGS[command]()))
    try:
        start = _STARTS[command](flags, others, os.environ)
        handler = _set_up_logging(start.config)
        with start.around():
            return _run(start, handler)
    except ConfigError as error:
        _print(str(error))
        return WRONG_USE
    except ModelLoadError as error:
        _print(str(error))
        return FAILED


def _start(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    options = {name: value for name, value in flags.items() if name in OPTIONS}
    for name, (_, meant) in WATCHING.items():
        if flags[name]:
            if (mode := options.get("model_control_mode", "poll")) != "poll":
                raise ConfigError(f"--{name}: needs --model-control-mode poll, got {mode}")
            options = {**meant, **options}
    config = load_config(flags["config"], environment, options)
    # argparse leaves paths that stand behind an option to us.
    paths = [*flags["paths"], *map(Path, others)]
    if not paths and (folder := vertex_model(environment)):
        paths = [folder]
    return Start(config, paths or [DEMO], skip_missing_dependencies=not paths)


def _start_tfserving(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    for other in others:
        raise ConfigError(f"expected flags only, got {other!r}")
    return Start(
        tfserving_cli.configuration(flags, environment),
        models=tfserving_cli.models(flags),
        batching=tfserving_cli.batching(flags),
        config_file=tfserving_cli.config_file(flags),
        poll_seconds=tfserving_cli.poll_seconds(flags),
        warnings=tfserving_cli.warnings(flags),
    )


def _start_grps(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    telemetry = Telemetry()
    settings, logs_in = grps_cli.read(flags, others)
    project = grps_cli.project_of(settings, telemetry)
    models, dag = grps_cli.project_models(project)
    return Start(
        grps_cli.configuration(settings.server, dag, flags, environment),
        models=models,
        warnings=settings.warnings,
        telemetry=telemetry,
        about=grps_cli.metadata(settings),
        around=partial(grps_cli.surroundings, settings, logs_in, telemetry),
        prepare=partial(grps_cli.load, project),
        test=partial(grps_cli.passes, settings, flags["unittest"]) if "unittest" in flags else None,
        # The project's log has it as well (grps 5.2).
        fails=partial(log.critical, "%s"),
    )


_FLAGS = {"serve": _flags, "tfserving": tfserving_cli.flag_names, "grps": grps_cli.flag_names}
_STARTS = {"serve": _start, "tfserving": _start_tfserving, "grps": _start_grps}


def _set_up_logging(config: Config) -> logging.Handler:
    """What writes the log. Raises `ConfigError` for a log_file that cannot be written."""
    try:
        handler = (
            logging.FileHandler(config.log_file, encoding="utf-8") if config.log_file else logging.StreamHandler()
        )
    except OSError as error:
        raise ConfigError(f"log_file: cannot write {config.log_file}: {error.strerror}") from None
    handler.setFormatter(formatter(config.log_format))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    # grpc logs a trace for every client that leaves in the middle of a call.
    logging.getLogger("grpc._cython.cygrpc").addFilter(
        lambda record: "ExecuteBatchError" not in str(record.msg) or config.log_level == "debug"
    )
    return handler


def _run(start: Start, handler: logging.Handler) -> int:
    for warning in start.warnings:
        log.warning("%s", warning)
    try:
        if start.test is not None:
            return 0 if start.test() else FAILED
        start.prepare()
        sys.setswitchinterval(SWITCH_SECONDS)
        return asyncio.run(_serve(start, handler))
    except (ModelLoadError, OSError) as error:
        start.fails(str(error))
        return FAILED


async def _serve(start: Start, handler: logging.Handler) -> int:
    # Here, so that a wrong flag or --help answers at once.
    from triglot.app import Server  # noqa: PLC0415

    # What is there by now stays: whoever collects garbage later need not go through it.
    gc.collect()
    gc.freeze()
    config = start.config
    signals = _listen_for_signals()
    server = Server(
        start.paths,
        config,
        models=start.models,
        adapt=start.batching,
        skip_missing_dependencies=start.skip_missing_dependencies,
        telemetry=start.telemetry,
        about=start.about,
        log_handler=handler,
    )
    if not await _unless_signalled(server.start(), signals):
        return _leave("stopped while loading")
    for line in hint_lines(server.metadata(), config, server.grpc_port, server.rest_port):
        print(line, flush=True)
    with _following(start, server):
        delay = config.drain_delay if await signals.get() is signal.SIGTERM else 0.0
    servables = server.manager.all_in_memory()
    if not await _unless_signalled(_stop(server, delay), signals):
        return _leave("stopped at once")
    if await _end_tasks():
        for servable in servables:
            if servable.leases:
                log.warning("%s still runs; the server does not wait for it", servable)
        return _leave("code on the event loop did not end when it was cancelled", 0)
    return 0


@contextmanager
def _following(start: Start, server: Server) -> Iterator[None]:
    """The models follow the configuration file, if they are to, until the block ends."""
    if start.config_file is None or not start.poll_seconds:
        yield
        return
    following = asyncio.create_task(
        tfserving_cli.follow(start.config_file, start.poll_seconds, server.manager.reload)
    )
    try:
        yield
    finally:
        following.cancel()


def _listen_for_signals() -> asyncio.Queue[signal.Signals]:
    """SIGTERM and SIGINT as they come; called before anything is loaded."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
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
