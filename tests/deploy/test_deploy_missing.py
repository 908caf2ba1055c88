"""The tests of files in deploy/ that need Kubernetes' schemas, Helm or KServe's package, where these are."""

from __future__ import annotations

from pathlib import Path

import pytest

from elsewhere import check_tests

FOLDER = Path(__file__).parent
FILES = {
    "kserve": ["test_kserve_manifests.py"],
    "deploy": ["test_kserve_pods.py", "test_chart.py"],
}


@pytest.mark.newest
@pytest.mark.parametrize("environment", FILES)
def test_they_hold(environment: str) -> None:
    check_tests(environment, *(FOLDER / file for file in FILES[environment]))
