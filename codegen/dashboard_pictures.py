"""Draws the pictures of deploy/grafana.json that docs/observability.md shows, of a server under load.

    python codegen/dashboard_pictures.py

Debian's package prometheus has to be installed. Grafana has no part in it: a picture has the panels of a row of
the dashboard with their places, titles, units and legends, and a Prometheus answers their expressions. Pictures
differ from run to run: they are made anew when the dashboard changes.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in (".", "access", "deploy", "transports")]

from tests.deploy.observed import GREEDY, TOKEN, Observed, observed  # noqa: E402 - these are of the tests.
from tests.deploy.prometheus_server import Prometheus, prometheus  # noqa: E402
from tests.deploy.shipped import filled, legend_of, picture_of, rows_of_panels  # noqa: E402
from tests.protocol_clients.every_protocol import INTERFACES, MODEL  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES = 280_000
RUN_SECONDS, STEP, INTERVAL = 150, 1.5, "8s"
BURST = range(60, 100)
"""Seconds of the run in which there are more requests than the models can take."""
UNIT, GAP = 50, 8  # Pixels of a column, and between panels.
ROW = 30
"""Pixels of a row of Grafana's grid."""
COLOURS = (
    "#3274d9",
    "#37872d",
    "#e0752d",
    "#c4162a",
    "#8f3bb8",
    "#0a8276",
    "#b877d9",
    "#967302",
    "#5794f2",
    "#ad0317",
)
SIZES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
TIMES = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
SUFFIXES = {"reqps": " req/s", "ops": " ops/s", "bytes": "B", "Bps": "B/s"}


# --- the run ---


async def call(server: Observed, started: float) -> None:
    """Call models for as long as the run lasts, and some more often in the burst."""
    rounds = count()
    calls: set[asyncio.Task[Any]] = set()

    def begin(model: str, token: str = "") -> None:
        calls.add(task := asyncio.ensure_future(server.infer(model, token)))
        task.add_done_callback(calls.discard)

    while (second := time.monotonic() - started) < RUN_SECONDS:
        number = next(rounds)
        if int(second) in BURST:
            for _ in range(2):
                begin("narrow", TOKEN)
            for _ in range(9):
                begin("batched")
        for _ in range(2 + int(2 * math.sin(second / 15) + 1.5)):
            begin("batched", TOKEN)
        begin("cached", TOKEN)
        if number % 2 == 0:
            begin(MODEL, TOKEN)
            await list(INTERFACES.values())[number // 2 % len(INTERFACES)](server, 1.0)
        if number % 5 == 0:
            begin("apart", TOKEN)
            begin("narrow")
        if number % 60 == 0:
            begin("failing")
            begin("absent")
            begin("holding")
            begin(MODEL, GREEDY)
            await server.infer_within("narrow", 0.02)
        await asyncio.sleep(0.04)
    await asyncio.gather(*calls)


# --- drawing ---


@dataclass(frozen=True)
class Line:
    """A series: its name, and its values, one a step; NaN where there is none."""

    name: str
    values: Sequence[float]

    @property
    def last(self) -> float:
        """The last value that there is."""
        return next((value for value in reversed(self.values) if not math.isnan(value)), math.nan)


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """A number as Grafana has it with a unit, about."""
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals else 0}f}%"
    if value == 0:
        return "0"
    steps, space = (TIMES, " ") if unit == "s" else (SIZES, "")
    reached = [name for name, size in steps.items() if abs(value) >= size * 0.999]
    name = reached[-1] if reached else next(iter(steps))
    return f"{value / steps[name]:.3g}{space}{name}{SUFFIXES.get(unit, '')}"


def total(column: Sequence[float]) -> float:
    """Of what is on top of one another: NaN where there is nothing."""
    values = [value for value in column if not math.isnan(value)]
    return sum(values) if values else math.nan


def ticks(highest: float, least: float = 0.0) -> list[float]:
    """Round numbers from 0 on, `least` apart or more, the last of which is not below `highest`."""
    if highest <= least:
        return [0.0, least or 1.0]
    step = max(least, 10 ** math.floor(math.log10(highest / 4)))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if step * factor * 4 >= highest * 0.999)
    return [step * number for number in range(math.ceil(highest / step - 1e-3) + 1)]


def text_at(x: float, y: float, text: str, size: int = 11, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}"{attributes}>{escape(text)}</text>'


def graph(panel: Mapping[str, Any], lines: Sequence[Line], width: int, height: int) -> Iterator[str]:
    """A time series panel, without its frame."""
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    stacked = "stacking" in custom
    legend = [line.name for line in lines]
    rows = legend_rows(legend, width - 20)
    left, top, right, bottom = 58, 34, width - 10, height - 26 - 15 * len(rows)
    values = [line.values for line in lines]
    if stacked:
        values = [
            [total(column[: number + 1]) for column in zip(*values, strict=True)] for number in range(len(values))
        ]
    highest = max((value for series in values for value in series if not math.isnan(value)), default=0.0)
    scale = ticks(max(highest, defaults.get("max", 0)), least=float(defaults.get("decimals") == 0))
    for tick in scale:
        y = bottom - (bottom - top) * tick / scale[-1]
        yield f'<path d="M{left} {y:.0f}H{right}" stroke="#e4e4e8"/>'
        yield text_at(
            left - 5,
            y + 4,
            shown(tick, defaults["unit"], defaults.get("decimals")),
            10,
            text_anchor="end",
            fill="#666",
        )
    for minute in range(0, RUN_SECONDS + 1, 30):
        x = left + (right - left) * minute / RUN_SECONDS
        yield text_at(x, bottom + 13, f"{minute // 60}:{minute % 60:02}", 10, text_anchor="middle", fill="#666")
    for number, series in reversed(list(enumerate(values))) if stacked else enumerate(values):
        colour = COLOURS[number % len(COLOURS)]
        for path, area in paths(
            series, left, right, top, bottom, scale[-1], custom.get("lineInterpolation") == "stepAfter"
        ):
            if stacked:
                yield f'<path d="{area}" fill="{colour}" fill-opacity=".25"/>'
            yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
    if not lines:
        yield text_at((left + right) / 2, (top + bottom) / 2, "No data", 12, text_anchor="middle", fill="#888")
    numbers = count()
    for row, names in enumerate(rows):
        x = 12.0
        for name in names:
            y = bottom + 32 + 15 * row
            colour = COLOURS[next(numbers) % len(COLOURS)]
            yield f'<path d="M{x:.0f} {y - 4}h10" stroke="{colour}" stroke-width="3"/>'
            yield text_at(x + 14, y, name, 10, fill="#333")
            x += legend_width(name)


def legend_width(name: str) -> float:
    return 26 + 6.2 * len(name)


def legend_rows(names: Sequence[str], width: float) -> list[list[str]]:
    """The names in lines that are no longer than this."""
    rows: list[list[str]] = []
    for name in names:
        if rows and sum(map(legend_width, rows[-1])) + legend_width(name) <= width:
            rows[-1].append(name)
        else:
            rows.append([name])
    return rows


def paths(
    values: Sequence[float], left: int, right: int, top: int, bottom: int, highest: float, stepped: bool
) -> Iterator[tuple[str, str]]:
    """The lines of a series, one for each run of values, and the areas below them."""
    run: list[tuple[float, float]] = []
    for number, value in enumerate([*values, math.nan]):
        if not math.isnan(value):
            x = left + (right - left) * number / (len(values) - 1)
            run.append((x, bottom - (bottom - top) * min(value / highest, 1.0)))
        elif run:
            points = [f"{run[0][0]:.0f} {run[0][1]:.1f}"]
            for (_, before), (x, y) in pairwise(run):
                points += [f"{x:.0f} {before:.1f}"] if stepped and y != before else []
                points.append(f"{x:.0f} {y:.1f}")
            line = "M" + "L".join(points)
            yield line, f"{line}V{bottom}H{run[0][0]:.0f}Z"
            run = []


def stat(panel: Mapping[str, Any], lines: Sequence[Line], width: int, height: int) -> Iterator[str]:
    """A panel of one number, without its frame: the last one, in the colour of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    value = lines[0].last if lines else math.nan
    steps = defaults["thresholds"]["steps"]
    (colour,) = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1:]
    fill = {"blue": COLOURS[0], "green": COLOURS[1], "yellow": COLOURS[7], "red": COLOURS[3]}[colour]
    number = "No data" if math.isnan(value) else shown(value, defaults["unit"], defaults.get("decimals"))
    yield text_at(width / 2, height / 2 + 22, number, 26, text_anchor="middle", fill=fill)


async def lines_of(real: Prometheus, panel: Mapping[str, Any], start: float, end: float) -> list[Line]:
    """What Prometheus has for a panel, by the names of its legend."""
    steps = round((end - start) / STEP) + 1
    found = []
    for target in panel["targets"]:
        expression = filled(target["expr"], INTERVAL)
        answer = await real.ask("query_range", query=expression, start=f"{start}", end=f"{end}", step=f"{STEP}")
        for series in answer["result"]:
            name = legend_of(target["legendFormat"], series["metric"])
            values = [math.nan] * steps
            for at, value in series["values"]:
                values[round((at - start) / STEP)] = float(value)
            if not all(map(math.isnan, values)):
                found.append(Line(name or "{}", values))
    return sorted(found, key=lambda line: line.name)


async def picture(real: Prometheus, panels: Sequence[Mapping[str, Any]], start: float, end: float) -> str:
    """A row's panels."""
    first = min(panel["gridPos"]["y"] for panel in panels)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - first
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
        f'viewBox="0 0 {24 * UNIT} {rows * ROW}">',
        f'<rect width="{24 * UNIT}" height="{rows * ROW}" fill="#f4f5f5"/>',
    ]
    for panel in panels:
        place = panel["gridPos"]
        width, height = place["w"] * UNIT - GAP, place["h"] * ROW - GAP
        x, y = place["x"] * UNIT + GAP // 2, (place["y"] - first) * ROW + GAP // 2
        draw = {"timeseries": graph, "stat": stat}[panel["type"]]
        lines = await lines_of(real, panel, start, end)
        parts += [
            f'<g transform="translate({x} {y})">',
            f'<rect width="{width}" height="{height}" rx="3" fill="#fff" stroke="#d8d9da"/>',
            text_at(10, 20, panel["title"], 13, font_weight="600", fill="#24292e"),
            *draw(panel, lines, width, height),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>", ""])


async def draw() -> None:
    """All pictures."""
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("prometheus is missing; on Debian: apt install prometheus")
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("servers", "prometheus"):
            (Path(folder) / name).mkdir()
        async with (
            observed(Path(folder) / "servers") as (server, _),
            prometheus(program, Path(folder) / "prometheus", [server.port]) as real,
        ):
            await server.calls_of_all_kinds()
            await asyncio.sleep(2)
            start = time.time()
            await call(server, time.monotonic())
            for row, panels in rows_of_panels():
                file = FOLDER / picture_of(row)
                file.write_text(await picture(real, panels, start, start + RUN_SECONDS))
                size += file.stat().st_size
                print(f"{file.relative_to(ROOT)}: {file.stat().st_size} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"the pictures have {size} bytes, expected {MOST_BYTES} at most")


if __name__ == "__main__":
    asyncio.run(draw())
