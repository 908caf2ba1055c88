"""Writes what repeats the command line's options: the tables in docs/configuration.md, and shells' completions.

python codegen/docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import shtab

from triglot.cli.completion import SCRIPTS, SHELLS
from triglot.cli.main import command_line
from triglot.cli.serve import help_text
from triglot.config.option_fields import default_text, flag_of, groups, option_type, value_name
from triglot.config.options import ENVIRONMENT_PREFIX, OPTIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
MORE = {
    "network": "[Security](operations.md#security)",
    "TLS": "[TLS](operations.md#tls)",
    "access": "[Security](security.md)",
    "protocols": "[Protocols](protocols.md), [shared memory](triton.md#shared-memory)",
    "grps": "[Coming from grps](migrating/grps.md)",
    "models": "[Lifecycle](lifecycle.md)",
    "scheduling": "[Scheduling](scheduling.md), [overload](operations.md#overload)",
    "limits of one request": "[Limits](operations.md#limits-of-one-request)",
    "connections": "[Connections](operations.md#connections-and-slow-clients)",
    "shutdown": "[Graceful shutdown](operations.md#graceful-shutdown)",
    "processes": "[Workers](operations.md#workers)",
    "Ray": "[Instances on a Ray cluster](ray.md)",
    "performance": "[Performance](performance.md)",
    "logs": "[Logs](operations.md#logs)",
    "metrics": "[Metrics](metrics.md)",
    "traces": "[Traces](triton.md#statistics-traces-log-settings)",
    "request records": "[Record and replay requests](records.md)",
}
"""Where more is said of each group of options."""


def tables() -> str:
    """A table for each group, in Markdown."""
    return "\n\n".join(
        f"### {title[0].upper()}{title[1:]}\n\n{_table(title, names)}"
        for title, names in groups(OPTIONS.values()).items()
    )


def _table(title: str, names: list[str]) -> str:
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name in names:
        option = OPTIONS[name]
        flag = f"{flag_of(name)} {value_name(option)}".strip().replace("|", "\\|")
        flags = f"`{flag}`" + (f", `{flag_of(f'no_{name}')}`" if option_type(option) is bool else "")
        default = f"`{text}`" if (text := default_text(option)) else "–"
        meaning = option.metadata["help"]
        lines.append(f"| {flags} | `{ENVIRONMENT_PREFIX}{name.upper()}` | {default} | {meaning} |")
    return "\n".join([f"More: {MORE[title]}.", "", *lines])


def page() -> str:
    """The page, with the tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def completion(shell: str) -> str:
    """A script that completes commands, options and their values."""
    parser = command_line()
    _add_values(parser)
    lines = shtab.complete(parser, shell=shell).splitlines()
    return "\n".join(map(str.rstrip, lines)) + "\n"


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Set the possible values of each argument: choices, or files and folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for named in action._choices_actions:
                command = action.choices[named.dest]
                command.description = named.help  # Shells show it next to the command.
                _add_values(command)
        elif option := OPTIONS.get(action.dest):
            action.choices = action.choices or option.metadata["choices"] or None
            action.help = help_text(action.dest)  # Also of those that only --help-all shows.
        if action.metavar in ("PATH", "FILE", "FOLDER", "PROJECT"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # Read by shtab.


def main() -> int:
    """Write the files, or with --check compare them; 1 when one differs."""
    files = {PAGE: page()} | {SCRIPTS / f"triglot.{shell}": completion(shell) for shell in SHELLS}
    if "--check" not in sys.argv[1:]:
        SCRIPTS.mkdir(exist_ok=True)
        for file, text in files.items():
            file.write_text(text)
        return 0
    old = [
        str(file.relative_to(ROOT))
        for file, text in files.items()
        if not file.exists() or file.read_text() != text
    ]
    if old:
        print(f"{', '.join(old)}: out of date; run `make codegen`", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
