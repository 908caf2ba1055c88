"""Runs test files in another virtual environment, which has the libraries that they need."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import environments
from tests.process import clean_environment

RUN_SECONDS = 900


def check_tests(environment: str, *files: Path, seconds: float = RUN_SECONDS) -> None:
    """Run test files in an environment, all in one process because its libraries take seconds to import.

    Raise `AssertionError` unless all tests pass and none is skipped, `subprocess.TimeoutExpired` after `seconds`.
    """
    done = subprocess.run(
        [str(environments.python(environment)), "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=clean_environment(),
        cwd=environments.ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
