"""The tests of files in deploy/ that need Kubernetes' schemas, Helm or KServe's package, where these are."""

from __future__ import annotations

from pathlib import Path

import pytest

from elsewhere import check_tests

FOLDER = Path(__file__).parent
FILES = {
    "test_kserve_manifests.py": "kserve",
    "test_kserve_pods.py": "deploy",
    "test_kserve_crds.py": "deploy",
    "test_chart.py": "deploy",
    "test_dockerfile.py": "deploy",
}


@pytest.mark.newest
@pytest.mark.parametrize(("file", "environment"), FILES.items())
def test_they_hold(file: str, environment: str) -> None:
    check_tests(environment, FOLDER / file)
