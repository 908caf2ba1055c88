"""`triglot completion`: prints a script for shell completion of commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "completions"
"""A script for each shell; `codegen/docs.py` writes them."""
SHELLS = ("bash", "fish", "zsh")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its argument."""
    parser = commands.add_parser(
        "completion",
        help="print a script for shell completion",
        description="Prints a script that completes commands, options and their values.",
        epilog="bash: source <(triglot completion bash). zsh: write it to a file _triglot in a folder of $fpath. "
        "fish: triglot completion fish | source.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS)


def run(flags: Mapping[str, Any], _: Sequence[str]) -> int:
    """Print the script of `flags["shell"]`; return the exit status."""
    print((SCRIPTS / f"triglot.{flags['shell']}").read_text(), end="")
    return 0
