"""The Grafana dashboard: that Grafana understands it, and that the server has all that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.observed import scraped
from tests.deploy.promql import labels_of
from tests.deploy.shipped import (
    DASHBOARD,
    DEPLOY,
    PANELS,
    dashboard_expressions,
    filled,
    picture_of,
    rows_of_panels,
)

WIDTH = 24
MOST_PICTURE_BYTES = 300_000
DOCS = DEPLOY.parent / "docs"
EXPRESSIONS = list(dashboard_expressions())


@pytest.mark.parametrize(("name", "expression", "shown"), EXPRESSIONS, ids=[name for name, *_ in EXPRESSIONS])
def test_the_server_has_what_is_shown(name: str, expression: str, shown: set[str]) -> None:
    labels = labels_of(filled(expression), scraped())
    assert labels is not None
    assert shown <= labels


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """The paths of what is not in a document that was read and written again."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from lost(value, theirs[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (index, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(index, other, f"{path}[{number}]")
    elif ours != theirs:
        yield f"{path}: {ours!r}, not {theirs!r}"


def test_grafanas_types_have_every_field() -> None:
    """By Grafana's own library of them."""
    plugins.register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert list(lost(DASHBOARD, again)) == []
    odd = {**DASHBOARD, "refesh": "30s"}
    assert list(lost(odd, json.loads(JSONEncoder().encode(Dashboard.from_json(odd))))) == [".refesh"]


def test_every_panel_has_a_number_and_a_place_of_its_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places = {panel["title"]: panel["gridPos"] for panel in panels}
    for title, place in places.items():
        assert place["x"] >= 0, title
        assert place["x"] + place["w"] <= WIDTH, title
    for (title, combination), (other_title, other) in combinations(places.items(), 2):
        side_by_side = (
            combination["x"] + combination["w"] <= other["x"] or other["x"] + other["w"] <= combination["x"]
        )
        below = combination["y"] + combination["h"] <= other["y"] or other["y"] + other["h"] <= combination["y"]
        assert side_by_side or below, f"{title} and {other_title} overlap"


def test_every_panel_says_what_it_shows() -> None:
    for panel in PANELS:
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert len(panel["description"]) > 40, panel["title"]
        assert panel["description"].endswith("."), panel["title"]


def test_everything_is_read_from_the_data_source_that_is_chosen() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    queries = [target for panel in PANELS for target in panel["targets"]]
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "model", "version"]
    assert variables.pop("datasource")["query"] == "prometheus"
    for element in (*PANELS, *queries, *variables.values(), *DASHBOARD["annotations"]["list"]):
        assert element["datasource"] == chosen


def test_the_pictures_show_the_dashboard() -> None:
    page, size = (DOCS / "observability.md").read_text(), 0
    for row, panels in rows_of_panels():
        picture = DOCS / "pictures" / picture_of(row)
        assert f"](pictures/{picture.name})" in page
        text = picture.read_text()
        titles = re.findall('font-weight="600"[^>]*>([^<]+)<', text)
        assert titles == [panel["title"] for panel in panels], "run codegen/dashboard_pictures.py"
        size += len(text)
    assert size < MOST_PICTURE_BYTES


def test_latencies_have_exemplars() -> None:
    histograms = [target for panel in PANELS for target in panel["targets"] if "_bucket" in target["expr"]]
    by_model = [target for target in histograms if "{{model}}" in target["legendFormat"]]
    assert len(by_model) >= 5
    assert all(target["exemplar"] for target in by_model)
