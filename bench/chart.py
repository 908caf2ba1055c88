"""Makes a bar chart as SVG, without a library."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LABELS, FIGURES = 820, 190, 90
BAR, GAP, TITLE = 14, 4, 26
COLOURS = ("#9aa0a6", "#5f6368", "#1a73e8", "#34a853", "#f9ab00", "#a142f4", "#d93025", "#12b5cb")


@dataclass(frozen=True, slots=True)
class Group:
    """Bars (name and value) with a common title; bars of the same name have the same colour in all groups."""

    title: str
    bars: Sequence[tuple[str, float]]


def svg(title: str, groups: Sequence[Group], unit: str) -> str:
    """Return the chart; the longest bar of each group has the full width."""
    names = list(dict.fromkeys(name for group in groups for name, _ in group.bars))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    parts = [_text(8, 18, title, "title")]
    y = TITLE + 8
    for group in groups:
        parts.append(_text(8, y + 14, group.title, "group"))
        y += TITLE - 4
        scale = (WIDTH - LABELS - FIGURES) / (max((value for _, value in group.bars), default=0.0) or 1.0)
        for name, value in group.bars:
            width = max(value * scale, 0.5)
            parts += [
                _text(LABELS - 6, y + BAR - 3, name, "name"),
                f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colours[name]}"/>',
                _text(LABELS + width + 5, y + BAR - 3, f"{value:.2f}{unit}", "figure"),
            ]
            y += BAR + GAP
        y += 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">\n'
        "<style>text{font:11px sans-serif;fill:#202124}.title{font-size:15px;font-weight:bold}"
        ".group{font-weight:bold}.name{text-anchor:end}</style>\n"
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    )
    return "\n".join((head, *parts, "</svg>\n"))


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'
