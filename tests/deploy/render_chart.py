"""Renders the chart by Helm itself: `-m tests.deploy.render_chart VALUES` (JSON) prints the objects as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.deployed import CHART, documents

helm = pytest.importorskip("helm_python", reason="the deploy environment has it")

RELEASE, NAMESPACE = "demo", "prod"


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects. Raise `helm_python.HelmError`, for values that the chart's schema refuses, too."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return [document for text in texts.values() for document in documents(text)]


if __name__ == "__main__":
    print(json.dumps(rendered(json.loads(sys.argv[1]))))
