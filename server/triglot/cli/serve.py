"""The command line: `triglot serve`, and the other commands as far as they are the same."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from triglot.cli import grps as grps_cli
from triglot.cli import tfserving as tfserving_cli
from triglot.cli.run import FAILED, Start, print_error, run, supervised
from triglot.cli.triton_flags import in_place_of
from triglot.config.options import OPTIONS, Config, ConfigError, flag_of, option_type, unknown
from triglot.config.sources import load_config, vertex_model
from triglot.core.errors import ModelLoadError
from triglot.telemetry.log_handlers import log_handler
from triglot.telemetry.log_settings import formatter
from triglot.telemetry.store import Telemetry
from triglot.version import __version__
from triglot.workers.worker_spec import WorkerSpec

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
JOINED = ("load_model", "named_predictions", "allowed_origins", "allowed_hosts")
"""Options whose flag may come more than once, as it does for Triton; its values add up."""
DEMO = Path(__file__).parents[1] / "demo"
WRONG_USE = 2


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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage before it would fill a screen."""

    def error(self, message: str) -> NoReturn:
        """See the base class."""
        self.exit(WRONG_USE, f"triglot: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="triglot",
        description="An inference server for KServe V2, TensorFlow Serving and grps clients.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triglot {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(_STARTS)}}}")
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


def main(arguments: Sequence[str] | None = None, *, spec: str = "") -> int:
    """Run the command, or be the worker of it that a `WorkerSpec`'s text tells of; the process's exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
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
        worker = WorkerSpec.read(spec) if spec else None
        handler = _set_up_logging(start.config, "" if worker is None else worker.source)
        if start.config.workers > 1 and worker is None and start.test is None:
            return supervised(start, arguments)
        with start.surroundings(1 if worker is None else worker.number):
            return run(start, handler, worker)
    except ConfigError as error:
        print_error(str(error))
        return WRONG_USE
    except ModelLoadError as error:
        print_error(str(error))
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
    flags = tfserving_cli.with_variables(flags, environment)
    config = tfserving_cli.configuration(flags, environment)
    return Start(
        config,
        models=tfserving_cli.models(flags),
        load=tfserving_cli.loading(flags),
        batching=tfserving_cli.batching(flags),
        config_file=tfserving_cli.config_file(flags),
        poll_seconds=tfserving_cli.poll_seconds(flags),
        warnings=tfserving_cli.warnings(flags),
        opened=partial(tfserving_cli.opened, config.host),
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
        surroundings=partial(grps_cli.surroundings, settings, logs_in, telemetry),
        prepare=partial(grps_cli.load, project),
        test=partial(grps_cli.passes, settings, flags["unittest"]) if "unittest" in flags else None,
        # The project's log has it as well (grps 5.2).
        fails=partial(log.critical, "%s"),
    )


_FLAGS = {"serve": _flags, "tfserving": tfserving_cli.flag_names, "grps": grps_cli.flag_names}
_STARTS = {"serve": _start, "tfserving": _start_tfserving, "grps": _start_grps}


def _set_up_logging(config: Config, source: str) -> logging.Handler:
    """What writes the log, `source` before each message.

    Raises `ConfigError` for a log_file that cannot be written.
    """
    try:
        handler = log_handler(config.log_file)
    except OSError as error:
        raise ConfigError(f"log_file: cannot write {config.log_file}: {error.strerror}") from None
    handler.setFormatter(formatter(config.log_format, source))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    # grpc's library writes to standard error by itself, a line for each TLS handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # grpc logs a trace for every client that leaves in the middle of a call.
    logging.getLogger("grpc._cython.cygrpc").addFilter(
        lambda record: "ExecuteBatchError" not in str(record.msg) or config.log_level == "debug"
    )
    return handler
