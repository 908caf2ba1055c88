"""Reads the results of the other benches from their texts: goals that they measure, and all lines with a goal."""

import re
from collections.abc import Iterator
from pathlib import Path

READY_SECONDS = 1.0
RESTING_MEBIBYTES = {"h2": 65, "aio": 90}
_START = re.compile(
    r"\s*start over +(?P<transport>\w+): ready after (?P<seconds>[\d.]+) s .*, (?P<resting>\d+) MiB at rest"
)


def quoted_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines with a goal, each after the name of its file."""
    for file in sorted(folder.glob("*.txt")):
        yield from ((file.name, line.strip()) for line in _lines(file) if ", goal" in line)


def rows(folder: Path) -> list[list[str]]:
    """As `aims.rows`: subject, goal, measured value, whether it was reached."""
    return list(_starts(_lines(folder / "lifecycle.txt")))


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _starts(lines: list[str]) -> Iterator[list[str]]:
    """Yield lines for starts with 18 small models, over each transport."""
    for found in filter(None, map(_START.fullmatch, lines)):
        over, seconds, resting = found["transport"], float(found["seconds"]), int(found["resting"])
        met = _yes(seconds <= READY_SECONDS)
        yield [f"start to ready, over {over}", f"at most {READY_SECONDS:g} s", f"{seconds:.2f} s", met]
        most = RESTING_MEBIBYTES[over]
        yield [f"resident at rest, over {over}", f"at most {most} MiB", f"{resting} MiB", _yes(resting <= most)]


def _yes(met: bool) -> str:
    return "yes" if met else "no"
