"""The instances of the TensorFlow backend, where TensorFlow is installed: one test per check of their script."""

from __future__ import annotations

import pytest
from client_scripts import ClientScript

import saved_models

# The script has libraries of its own: another environment of these tests changes nothing.
pytestmark = pytest.mark.newest

SCRIPT = ClientScript("tensorflow", "tf_backend_devices.py")
MODELS = ("half_plus_two", "counter", "tf2_vocabulary")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check found, in order; an empty text for one that held."""
    folder = saved_models.write(tmp_path_factory.mktemp("saved_models"), *MODELS)
    report = SCRIPT.run_with(str(folder))
    assert report.end.startswith("exit status 0\n"), report.end
    return report.findings


@pytest.mark.parametrize("name", SCRIPT.check_names())
def test_check(name: str, findings: dict[str, str]) -> None:
    assert not findings[name], findings[name]


def test_every_check_is_reported_in_order(findings: dict[str, str]) -> None:
    assert list(findings) == SCRIPT.check_names()
