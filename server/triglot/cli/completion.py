"""`triglot completion`: prints a script for shell completion of commands, options and their values."""

from __future__ import annotations

import argparse
from typing import Any

from triglot.cli.serve import help_text
from triglot.config.options import OPTIONS, ConfigError

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its argument."""
    parser = commands.add_parser(
        "completion",
        help="print a script for shell completion",
        description="Prints a script that completes commands, options and their values; needs shtab.",
        epilog="bash: source <(triglot completion bash). zsh: write it to a file _triglot in a folder of $fpath. "
        "fish: triglot completion fish | source.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS)


def write_script(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script and return the exit status. Raise `ConfigError` if shtab is not installed."""
    try:
        import shtab  # noqa: PLC0415 - only needed by this command.
    except ModuleNotFoundError:
        raise ConfigError("completion: shtab is not installed; run: pip install shtab") from None
    _add_values(parser, shtab.FILE)
    print(shtab.complete(parser, shell=shell))
    return 0


def _add_values(parser: argparse.ArgumentParser, files: Any) -> None:
    """Set the possible values of each argument: choices, or files and folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for named in action._choices_actions:
                command = action.choices[named.dest]
                command.description = named.help  # Shells show it next to the command.
                _add_values(command, files)
        elif option := OPTIONS.get(action.dest):
            action.choices = action.choices or option.metadata["choices"] or None
            action.help = help_text(action.dest)  # Also of those that only --help-all shows.
        if action.metavar in ("PATH", "FILE", "FOLDER", "PROJECT"):
            action.complete = files  # type: ignore[attr-defined]  # Read by shtab.
