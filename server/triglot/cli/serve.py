"""`triglot serve`: its options, and what it starts."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from triglot.config.option_fields import default_text, flag_of, groups, option_type, value_name
from triglot.config.options import OPTIONS, REPEATED, ConfigError
from triglot.config.sources import load_config, vertex_model
from triglot.repository.config.settings import NAME, NAME_RULE
from triglot.repository.scan.source import NamedPath
from triglot.run import DEMO, Start

POLL: Mapping[str, Any] = {"model_control_mode": "poll"}
WATCHING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "watch": ("follow the file system: short for --model-control-mode poll", POLL),
    "reload": (
        "while you write a model: --watch with two scans a second; code that does not load leaves the old one "
        "serving, and the errors of its code reach the client",
        {**POLL, "poll_interval": 0.5},
    ),
}
"""Flags of `serve` that set several options: their help, and the options."""


MAIN = (
    "host",
    "grpc_port",
    "rest_port",
    "workers",
    "model_control_mode",
    "exit_on_load_error",
    "default_timeout",
    "access",
    "tls_certificate",
    "tls_key",
    "log_level",
)
"""Options that --help lists; --help-all lists every one."""


class _HelpAll(argparse.Action):
    """Prints the help with all options, and ends the process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        for action in parser._actions:
            if action.dest in OPTIONS:
                action.help = help_text(action.dest)
        parser.print_help()
        parser.exit()


class _Joined(argparse.Action):
    """A flag that may be repeated; its values are joined with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        before = [getattr(namespace, self.dest)] if hasattr(namespace, self.dest) else []
        setattr(namespace, self.dest, ",".join([*before, values]))


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its paths and its options."""
    parser = commands.add_parser(
        "serve",
        help="serve models",
        usage="triglot serve [OPTION ...] [PATH ...]",
        description="Loads the models at the paths and serves them over gRPC and REST.",
        epilog="--help-all lists every option. Options are also TRIGLOT_ variables (TRIGLOT_GRPC_PORT) and keys "
        "of the TOML file (grpc_port).",
        allow_abbrev=False,
    )
    add_arguments(parser, shown=MAIN)


def add_arguments(parser: argparse.ArgumentParser, shown: Collection[str]) -> None:
    """Add the paths and all options; --help lists those that are `shown`, --help-all every one."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a repository folder (NAME/[VERSION/]files), a model folder, a model file, or the URL of one (s3://, "
        "gs://, az://, hf://, https://); NAME=PATH gives the folder or the file that name; without one, the "
        "embedded demo models",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="name of the model at the one PATH, in place of its folder's name"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with the options below as keys")
    for name, (help_text, _) in WATCHING.items():
        parser.add_argument(f"--{name}", action="store_true", help=help_text)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options, and exit")
    for title, names in groups(OPTIONS.values()).items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_option(group, name, shown=name in shown)


def help_text(name: str) -> str:
    """Return the help of an option, as argparse formats it."""
    option = OPTIONS[name]
    default = default_text(option)
    text: str = option.metadata["help"] + (f" (default: {default})" if default else "")
    return text.replace("%", "%%")


def _add_option(group: argparse._ArgumentGroup, name: str, *, shown: bool) -> None:
    option = OPTIONS[name]
    add = partial(
        group.add_argument,
        flag_of(name),
        default=argparse.SUPPRESS,
        help=help_text(name) if shown else argparse.SUPPRESS,
    )
    if option_type(option) is bool:
        add(action=argparse.BooleanOptionalAction)
    elif name in REPEATED:
        add(action=_Joined, metavar=value_name(option))
    else:
        add(type=option_type(option), metavar=value_name(option))


def start(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    """Return the start of `triglot serve`. Raise `ConfigError`."""
    options = {name: value for name, value in flags.items() if name in OPTIONS}
    for name, (_, meant) in WATCHING.items():
        if flags[name]:
            if (mode := options.get("model_control_mode", "poll")) != "poll":
                raise ConfigError(f"--{name}: needs --model-control-mode poll, got {mode}")
            options = {**meant, **options}
    config = load_config(flags["config"], environment, options)
    if flags["reload"] and "debug" not in options and config.on_loopback:
        config = replace(config, debug=True)
    # argparse returns paths that follow an option separately.
    paths = [_path(text) for text in (*flags["paths"], *others)]
    if not paths and (folder := vertex_model(environment)):
        paths = [folder]
    if (name := flags["model_name"]) is not None:
        paths = [_named(name, paths)]
    hint = "; --no-exit-on-load-error serves the others" if config.exit_on_load_error else ""
    return Start(config, paths or [DEMO], skip_missing_dependencies=not paths, load_hint=hint)


def _path(text: str) -> Path | NamedPath:
    """Return the path in `PATH` or `NAME=PATH`; a path with "=" in its first part must be ./PATH.

    Raise `ConfigError`.
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        return Path(text)
    if not path:
        raise ConfigError(f"{text}: expected NAME=PATH")
    return _named(name, [Path(path)], text)


def _named(name: str, paths: Sequence[Path | NamedPath], source: str = "--model-name") -> NamedPath:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{source}: {name!r} is not a valid model name; {NAME_RULE}")
    match paths:
        case [Path() as path]:
            return NamedPath(name, path)
        case [NamedPath()]:
            raise ConfigError(f"{source}: expected PATH without a name of its own, got NAME=PATH")
    raise ConfigError(f"{source}: expected one PATH, got {len(paths)}; name each of several by NAME=PATH")
