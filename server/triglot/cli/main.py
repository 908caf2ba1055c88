"""The command line: parses it, sets up the log, runs the command, and determines the exit status."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from triglot import parts
from triglot.cli.triton_flags import replacement_of
from triglot.config.option_fields import unknown
from triglot.config.options import ConfigError
from triglot.core.errors import ModelLoadError
from triglot.dataplane.control import Control
from triglot.parts import MissingPart, missing_text
from triglot.run import FAILED, Start, print_error, run, set_up_logging, supervised
from triglot.telemetry.log_settings import JSON
from triglot.version import __version__, build

log = logging.getLogger(__name__)

WRONG_USE = 2
COMMANDS = {
    name: f"triglot.cli.{name}"
    for name in (
        "serve",
        "check",
        "infer",
        "models",
        "traffic",
        "replay",
        "tfserving",
        "grps",
        "mlserver",
        "token",
        "completion",
    )
}
"""Modules of the commands, of which only the one that is run is imported.

Each has `add_parser`, and either `start`, which returns the `Start` of a command that loads models, or `run`,
which returns the exit status.
"""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, as the usage would fill a screen."""

    def error(self, message: str) -> NoReturn:
        """See the base class."""
        self.exit(WRONG_USE, f"triglot: {message}\n")


def command_line(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of one command; if there is no such command, of all of them."""
    parser: argparse.ArgumentParser = _Parser(
        prog="triglot",
        description="An inference server for KServe V2, TensorFlow Serving and grps clients.",
        epilog="triglot COMMAND --help lists the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triglot {__version__} ({build()})")
    if command and not command.startswith("-") and command not in COMMANDS:
        parser.error(f"{unknown(command, COMMANDS, 'command')}; there are {', '.join(COMMANDS)}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    if command in COMMANDS:
        try:
            _module(command).add_parser(commands)
        except MissingPart as error:
            parser.error(str(error))
    else:
        for name in COMMANDS:
            with suppress(MissingPart):
                _module(name).add_parser(commands)
    for command_parser in commands.choices.values():
        command_parser.set_defaults(flag_names=list(command_parser._option_string_actions))
    return parser


def _module(command: str) -> Any:
    """Return a command's module. Raise `MissingPart` if it is for a part that is not there."""
    try:
        return importlib.import_module(COMMANDS[command])
    except ModuleNotFoundError as error:
        raise MissingPart(missing_text(f"the command {command}", error)) from error


def main(arguments: Sequence[str] | None = None, *, spec: str = "") -> int:
    """Run the command, or a worker of it with this `spec`; return the process's exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = command_line(*arguments[:1])
    known, others = parser.parse_known_args(arguments)
    flags = vars(known)
    command = flags.pop("command")
    if command is None:
        parser.print_help()
        return 0
    flag_names = flags.pop("flag_names")
    for other in others:
        if other.startswith("-"):
            flag = other.split("=")[0]
            ours = replacement_of(flag) if command in ("serve", "check") else ""
            parser.error(f"unknown option {flag!r}{ours}" if ours else unknown(flag, flag_names))
    try:
        module = _module(command)
        if not hasattr(module, "start"):
            _end_at_hangup()
            status: int = module.run(flags, others)
            return status
        start: Start = module.start(flags, others, os.environ)
        if start.config.workers == 1 and not start.config.rotated_files:
            _end_at_hangup()
        control: Control = parts.load("part", "worker")(spec) if spec else Control()
        handler = set_up_logging(start.config, 0 if control.single_process else control.number)
        if start.config.log_format == JSON and start.fails is print_error:
            start = replace(start, fails=partial(log.critical, "%s"))
        if start.config.workers > 1 and control.single_process and start.test is None:
            return supervised(start, arguments)
        with start.surroundings(control.number):
            return run(start, handler, control)
    except ConfigError as error:
        print_error(str(error))
        return WRONG_USE
    except ModelLoadError as error:
        print_error(str(error))
        return FAILED


def _end_at_hangup() -> None:
    """Let SIGHUP end the process again, as before `triglot.__main__`; not if nohup lets it be ignored."""
    if callable(signal.getsignal(signal.SIGHUP)):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
