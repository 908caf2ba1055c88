"""The dashboard and the alert rules of deploy/, and the expressions in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS, ALERT_CASES = DEPLOY / "alerts.yaml", DEPLOY / "alerts_test.yaml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES: list[dict[str, Any]] = DASHBOARD["templating"]["list"]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*), (?P<label>\w+)\)")
_LEGEND = re.compile(r"{{ *(\w+) *}}")


def filled(expression: str, interval: str = "1m") -> str:
    """An expression of the dashboard as Grafana sends it where All is chosen."""
    text = expression.replace("$__rate_interval", interval)
    for variable in VARIABLES:
        text = text.replace(f'"${variable["name"]}"', '".*"')
    assert "$" not in text, f"a variable that the dashboard does not have: {text}"
    return text


def dashboard_expressions() -> Iterator[tuple[str, str, set[str]]]:
    """What each is for, the expression, and the labels that are shown of its result."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"], labels_in(target["legendFormat"])
    for note in DASHBOARD["annotations"]["list"]:
        yield note["name"], note["expr"], set()
    for variable in VARIABLES:
        if variable["type"] == "query":
            match = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert match is not None, variable
            yield f"${variable['name']}", match["selector"], {match["label"]}


def rows_of_panels() -> list[tuple[str, list[dict[str, Any]]]]:
    """The title of each row, and its panels."""
    rows: list[tuple[str, list[dict[str, Any]]]] = []
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    return rows


def picture_of(row: str) -> str:
    """The file name of a row's picture in docs/pictures."""
    return f"dashboard_{row.partition(' (')[0].lower().replace(' ', '_')}.svg"


def labels_in(legend: str) -> set[str]:
    """Those that a legend shows."""
    return set(_LEGEND.findall(legend))


def legend_of(legend: str, labels: Mapping[str, str]) -> str:
    """The name of a series with these labels."""
    return _LEGEND.sub(lambda match: labels.get(match[1], ""), legend).strip()


def alert_expressions() -> Iterator[tuple[str, str, set[str]]]:
    """The name, the expression, and the labels that its texts show."""
    for rule in RULES:
        shown = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        yield rule["alert"], rule["expr"], set(shown)
