"""The TensorFlow inferer and converter of grps projects, where TensorFlow is installed: one test per check."""

from __future__ import annotations

import json
import subprocess

import pytest
from client_scripts import CLIENTS, RUN_SECONDS, ClientScript

import environments
from process import clean_environment

# The script has libraries of its own: another environment of these tests changes nothing.
pytestmark = pytest.mark.newest

SCRIPT = ClientScript("tensorflow", "tf_grps.py")


@pytest.fixture(scope="module")
def findings() -> dict[str, str]:
    """What each check found, in order; an empty text for one that held."""
    done = subprocess.run(
        [str(environments.python(SCRIPT.environment)), str(CLIENTS / SCRIPT.file)],
        capture_output=True,
        timeout=RUN_SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    results = [json.loads(line) for line in done.stdout.decode().splitlines()]
    return {result["name"]: "" if result["ok"] else result["detail"] for result in results}


@pytest.mark.parametrize("name", SCRIPT.check_names())
def test_check(name: str, findings: dict[str, str]) -> None:
    assert not findings[name], findings[name]


def test_every_check_is_reported_in_order(findings: dict[str, str]) -> None:
    assert list(findings) == SCRIPT.check_names()
