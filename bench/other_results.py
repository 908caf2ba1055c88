"""Reads the results of the other benches from their texts: goals that they measure, and all lines with a goal."""

import re
from collections.abc import Iterator
from pathlib import Path

READY_SECONDS = 1.0
RESTING_MEBIBYTES = {"h2": 65, "aio": 90}
_START = re.compile(
    r"\s*start over +(?P<transport>\w+): ready after (?P<seconds>[\d.]+) s .*, (?P<resting>\d+) MiB at rest"
)
WRONG = "WRONG"
"""Verdict on a shape whose memory grows, or whose calls did not end as they should."""
_TRANSPORT = re.compile(r"\w+")
_SLOPE = re.compile(r"\s*(?P<shape>.+): +(?P<bytes>-?\d+) bytes a call, .*, (?P<said>.+)")
_LIMITS = re.compile(r"less than (\d+) bytes a call wanted, more than (\d+) of what keeps (\d+)")


def quoted_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines with a goal, each after the name of its file."""
    for file in sorted(folder.glob("*.txt")):
        yield from ((file.name, line.strip()) for line in _lines(file) if ", goal" in line)


def rows(folder: Path) -> list[list[str]]:
    """As `aims.rows`: subject, goal, measured value, whether it was reached."""
    return [*_starts(_lines(folder / "lifecycle.txt")), *_leaks(_lines(folder / "leaks.txt"))]


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _starts(lines: list[str]) -> Iterator[list[str]]:
    """Yield lines for starts with the demo repository, over each transport."""
    for found in filter(None, map(_START.fullmatch, lines)):
        over, seconds, resting = found["transport"], float(found["seconds"]), int(found["resting"])
        met = _yes(seconds <= READY_SECONDS)
        yield [f"start to ready, over {over}", f"at most {READY_SECONDS:g} s", f"{seconds:.2f} s", met]
        most = RESTING_MEBIBYTES[over]
        yield [f"resident at rest, over {over}", f"at most {most} MiB", f"{resting} MiB", _yes(resting <= most)]


def _leaks(lines: list[str]) -> Iterator[list[str]]:
    """Yield lines, over each transport, for the shape of calls whose memory grows fastest, and for the control,
    which keeps memory on purpose."""
    limits = next(filter(None, map(_LIMITS.fullmatch, lines)), None)
    if limits is None:
        return
    most, seen, kept = map(int, limits.groups())
    slopes: dict[str, list[tuple[int, str, bool]]] = {}
    transport = ""
    for line in lines:
        if (found := _SLOPE.fullmatch(line)) is not None:
            slope = int(found["bytes"]), found["shape"].strip(), found["said"] != WRONG
            slopes.setdefault(transport, []).append(slope)
        elif _TRANSPORT.fullmatch(line):
            transport = line
    for transport, (*shapes, (control, _, control_right)) in slopes.items():
        if shapes:
            worst, shape, _ = max(shapes)
            what = f"memory that a call leaves over {transport}, worst of {len(shapes)} shapes: {shape}"
            right = _yes(all(right for _, _, right in shapes))
            yield [what, f"less than {most} bytes", f"{worst} bytes", right]
        what = f"the same where {kept} bytes are kept on purpose"
        yield [what, f"more than {seen} bytes", f"{control} bytes", _yes(control_right)]


def _yes(met: bool) -> str:
    return "yes" if met else "no"
