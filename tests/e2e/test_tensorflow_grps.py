"""The TensorFlow inferer and converter of grps projects, where TensorFlow is installed: one test per check."""

from __future__ import annotations

import pytest
from client_scripts import ClientScript

# The script has libraries of its own: another environment of these tests changes nothing.
pytestmark = pytest.mark.newest

SCRIPT = ClientScript("tensorflow", "tf_grps.py")


@pytest.fixture(scope="module")
def findings() -> dict[str, str]:
    """What each check found, in order; an empty text for one that held."""
    report = SCRIPT.run_with()
    assert report.end.startswith("exit status 0\n"), report.end
    return report.findings


@pytest.mark.parametrize("name", SCRIPT.check_names())
def test_check(name: str, findings: dict[str, str]) -> None:
    assert not findings[name], findings[name]


def test_every_check_is_reported_in_order(findings: dict[str, str]) -> None:
    assert list(findings) == SCRIPT.check_names()
