"""The tests of files in deploy/ that need Kubernetes' schemas, Helm or KServe's package, where these are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment_tests import check_tests

FOLDER = Path(__file__).parent
FILES = {
    "kserve": ("kserve_manifests",),
    "deploy": ("kserve_pods", "kserve_crds", "chart", "dockerfile"),
}
"""By the environment that they need."""


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(("environment", "files"), FILES.items())
def test_they_hold(environment: str, files: tuple[str, ...]) -> None:
    check_tests(environment, *(FOLDER / f"test_{file}.py" for file in files))
