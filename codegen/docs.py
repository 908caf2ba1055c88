"""Writes the table of options in docs/configuration.md from `triglot.config`.

python codegen/docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from triglot.config.options import ENVIRONMENT_PREFIX, OPTIONS, option_type

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"


def table() -> str:
    """The table in Markdown."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        flag = f"`--{name.replace('_', '-')}`"
        if option_type(name) is bool:
            flag += f", `--no-{name.replace('_', '-')}`"
        default = str(option.default).lower() if option_type(name) is bool else option.default
        lines.append(
            f"| {flag} | `{ENVIRONMENT_PREFIX}{name.upper()}` | `{default}` | {option.metadata['help']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Write the page, or with --check compare it; 1 when it differs."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(written)
    elif text != written:
        print("docs/configuration.md: the table of options is out of date; run `make codegen`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
