"""Writes the tables of options in docs/configuration.md from `triglot.config`.

python codegen/docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from triglot.config.option_fields import default_text, flag_of, groups, option_type, value_name
from triglot.config.options import ENVIRONMENT_PREFIX, OPTIONS

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
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


def main() -> int:
    """Write the page, or with --check compare it; 1 when it differs."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{tables()}\n{END}{after}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(written)
    elif text != written:
        print("docs/configuration.md: the tables of options are out of date; run `make codegen`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
